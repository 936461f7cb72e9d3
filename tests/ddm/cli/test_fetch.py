"""`ddm fetch` and `ddm push`, and commands that take an address in place of a folder, as they are typed."""

import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from ddm import open_ensemble
from ddm.system.processes import program
from tests.conftest import PublishedRelease
from tests.support.commands import CommandResult, run_command
from tests.support.hosts import HostHandler, HostState, serve, silent
from tests.support.hub import TOKEN, serve_hub


@dataclass(frozen=True)
class Reader:
    """A researcher: a host with the release, and folders of their own."""

    published: PublishedRelease
    url: str
    state: HostState
    path: Path

    @property
    def trust(self) -> list[object]:
        """The options by which a release is verified and fetched."""
        root = self.published.root
        return ["--root", root, "--state", self.path / "state", "--cache", self.path / "cache"]

    def run(self, verb: str, *words: object) -> CommandResult:
        return run_command("ddm", verb, *words, *self.trust)

    def fetched_experts(self) -> list[str]:
        """The silos whose experts were sent, in their order."""
        paths = [path for path in self.state.paths() if path.endswith("/expert.safetensors")]
        return [path.split("/")[4] for path in paths]


@pytest.fixture
def reader(published_once: PublishedRelease, tmp_path: Path) -> Iterator[Reader]:
    state = HostState(published_once.release)
    with serve(HostHandler, state) as url:
        yield Reader(published_once, url, state, tmp_path)


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_fetched_release_is_that_of_the_host_and_verifies(reader: Reader) -> None:
    out = reader.path / "release"
    result = reader.run("fetch", reader.url, out)
    assert result.code == 0, result.err
    assert "all signed" in result.out
    assert files_below(out) == files_below(reader.published.release)
    assert reader.run("verify", out).code == 0
    refused = reader.run("fetch", reader.url, out)
    assert refused.code == 3
    assert "to do:" in refused.err


def test_information_about_a_release_on_a_host_needs_no_expert(reader: Reader) -> None:
    result = reader.run("info", reader.url, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["plan_id"] == reader.published.plan_id
    assert reader.fetched_experts() == []


def test_verification_of_a_release_on_a_host_reads_every_expert(reader: Reader) -> None:
    result = reader.run("verify", reader.url)
    assert result.code == 0, result.err
    assert sorted(reader.fetched_experts()) == ["east", "north"]


@pytest.mark.parametrize("words", [(), ("--processes", 2), ("--strategy", "full")])
def test_only_experts_that_samples_follow_are_fetched_and_samples_are_those_of_the_folder(
    reader: Reader, words: tuple[object, ...]
) -> None:
    drawing = ("--num", 5, "--prior", "east=1", "--steps", 2, *words)
    there = reader.run("sample", reader.url, *drawing, "--out", reader.path / "there.npz")
    assert there.code == 0, there.err
    assert reader.fetched_experts() == ["east"]
    here = reader.run(
        "sample", reader.published.release, *drawing, "--out", reader.path / "here.npz"
    )
    assert here.code == 0, here.err
    with np.load(reader.path / "there.npz") as first, np.load(reader.path / "here.npz") as second:
        assert np.array_equal(first["images"], second["images"])


def test_ensemble_in_python_fetches_an_expert_when_it_is_first_used(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPELAGO_CACHE", str(reader.path / "cache"))
    ensemble = open_ensemble(reader.url, root=reader.published.root)
    assert reader.fetched_experts() == []
    drawn = ensemble.sample(4, strategy="lock", steps=2, prior=[0.0, 1.0])
    assert reader.fetched_experts() == ["north"]
    folder = open_ensemble(reader.published.release, root=reader.published.root)
    same = folder.sample(4, strategy="lock", steps=2, prior=[0.0, 1.0])
    assert torch.equal(drawn.images, same.images)


def test_interrupted_fetch_keeps_what_came_and_the_same_command_goes_on(reader: Reader) -> None:
    [expert] = reader.published.release.rglob("north/expert.safetensors")
    path = f"/{expert.relative_to(reader.published.release).as_posix()}"
    reader.state.answers[path] = silent
    words = ["fetch", reader.url, reader.path / "release", *reader.trust]
    process = subprocess.Popen(
        [str(program("ddm")), *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    try:
        while path not in reader.state.paths():
            assert process.poll() is None
            reader.state.over.wait(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "The same command goes on from there." in err
    assert not (reader.path / "release").exists()
    reader.state.answers.clear()
    reader.state.requests.clear()
    result = run_command("ddm", *words)
    assert result.code == 0, result.err
    assert [path for path in reader.state.paths() if path.startswith("/targets")][0] == path
    assert files_below(reader.path / "release") == files_below(reader.published.release)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_pushed_release_is_fetched_from_the_hub(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_hub(reader.path / "hub") as (address, state):
        # The package reads HF_ENDPOINT when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        card_options = ("--base-model", "a/b", "--dataset", "mnist", "--tag", "x-ray")
        pushed = reader.run("push", reader.published.release, "hf://clinic/digits", *card_options)
        assert pushed.code == 0, pushed.err
        card = state.files("clinic/digits")["README.md"].decode()
        assert 'base_model: ["a/b"]\ndatasets: ["mnist"]\n---\n' in card
        result = reader.run("fetch", "hf://clinic/digits", reader.path / "release")
    assert result.code == 0, result.err
    assert files_below(reader.path / "release") == files_below(reader.published.release)
