"""The commands as clumsy and unlucky people use them: one screen, what to do, the right exit code, nothing lost."""

import io
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

import aggregator.cli
import ddm.cli.main
import silo.cli
from ddm.errors import ExpiredError
from ddm.protocol.base import now_utc, sha256_file
from ddm.system.console import run_app
from ddm.system.process_table import descendants
from ddm.system.processes import free_port, program
from ddm.trust.verify import verify_release
from silo.config import Site
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.federation import (
    PASSPHRASE,
    POLICY,
    TinyFederation,
    images,
    recipe,
    set_training,
    write_policy,
)
from tests.support.forked import fork_process, wait_for_exit
from tests.support.processes import is_running
from tests.support.publishing import publish_unchecked
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parent.parent
APPS = {"silo": silo.cli.app, "aggregator": aggregator.cli.app, "ddm": ddm.cli.main.app}
MAX_LINES = 24


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: object
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, without a terminal; whatever it says fits on one screen and is no stack trace."""

    def command(*words: object, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_app(APPS[str(words[0])], [str(word) for word in words[1:]])
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert len(said.err.splitlines()) <= MAX_LINES
        assert ended.value.code != 1, said.err
        if ended.value.code not in (0, 2):
            assert "to do:" in said.err
        return Done(ended.value.code, said.out, said.err)

    return command


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file with the right passphrase."""
    path = tmp_path / "secret"
    path.write_bytes(PASSPHRASE + b"\n")
    return path


@pytest.fixture(scope="session")
def planned_once(tmp_path_factory: pytest.TempPathFactory) -> TinyFederation:
    """A federation whose plan has reached silo north; training would take minutes."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("planned"), {"east": 60, "north": 60})
    chosen = recipe()
    training = chosen.expert.training.model_copy(update={"num_steps": 100_000})
    plan_id = tiny.sign(
        chosen.model_copy(
            update={"expert": chosen.expert.model_copy(update={"training": training})}
        )
    )
    tiny.deliver_plan("north", plan_id)
    return tiny


@pytest.fixture
def planned(planned_once: TinyFederation, tmp_path: Path) -> TinyFederation:
    """A copy that a test may change."""
    return planned_once.copy(tmp_path / "planned")


def edit(path: Path, old: str, new: str) -> None:
    """Change a configuration file as a person would."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Keys and first steps


def test_key_stays_closed_when_the_passphrase_is_wrong_empty_absent_or_nobody_can_be_asked(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path
) -> None:
    enroll = ("silo", "enroll", planned.sites["north"].path, "--out", tmp_path / "card.json")
    (tmp_path / "wrong").write_text("another correct horse\n")
    (tmp_path / "empty").touch()
    assert run(*enroll, "--passphrase-file", tmp_path / "wrong").code == 5
    assert run(*enroll, "--passphrase-file", tmp_path / "empty").code == 5
    assert run(*enroll, "--passphrase-file", tmp_path / "absent").code == 4
    assert run(*enroll, "--passphrase-file", tmp_path).code == 4
    assert run(*enroll, "--passphrase-file", "-").code == 5
    assert run(*enroll, "--passphrase-file", "-", stdin="wrong\n").code == 5
    assert run(*enroll).code == 5
    assert not (tmp_path / "card.json").exists()
    assert run(*enroll, "--passphrase-file", "-", stdin=PASSPHRASE.decode()).code == 0
    assert run(*enroll, "--passphrase-file", secret).code == 0


def test_configured_passphrase_file_that_is_gone_is_named(
    run: Run, planned: TinyFederation, tmp_path: Path
) -> None:
    site = planned.sites["north"].path
    edit(
        site / "silo.toml", "poll_s = 0.5", f'poll_s = 0.5\npassphrase_file = "{tmp_path / "gone"}"'
    )
    result = run("silo", "enroll", site, "--out", tmp_path / "card.json")
    assert result.code == 4
    assert str(tmp_path / "gone") in result.err
    assert "configuration" in result.err


def init_words(tiny: TinyFederation, site: Path, secret: Path, **changes: object) -> list[object]:
    """The words of `silo init` for a new silo called south."""
    options = {
        "id": "south",
        "data": tiny.path / "north.npz",
        "invitation": tiny.federation.path / "invitation.json",
    }
    options |= {"code": invitation_digest_of(tiny), "passphrase-file": secret} | changes
    return [
        "silo",
        "init",
        site,
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]


def invitation_digest_of(tiny: TinyFederation) -> str:
    """The digest that the operator would read out."""
    return sha256_file(tiny.federation.path / "invitation.json")


def test_silo_init_refuses_a_root_that_is_not_the_one_named_out_of_band(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path
) -> None:
    site = tmp_path / "south"
    result = run(*init_words(planned, site, secret, **{"code": "0" * 64}))
    assert result.code == 19
    # To paste the right one from here would trust whoever sent the invitation.
    assert invitation_digest_of(planned) not in result.err
    assert run(*init_words(planned, site, secret, **{"code": "short"})).code == 3
    assert run(*init_words(planned, site, secret, invitation=secret)).code == 21
    assert run(*init_words(planned, site, secret, data=tmp_path / "absent.npz")).code == 4
    short = tmp_path / "short.npz"
    np.savez(
        short, images=np.zeros((4, 1, 4, 4), np.float32), patients=np.arange(3), labels=np.arange(5)
    )
    refused = run(*init_words(planned, site, secret, data=short))
    assert refused.code == 7 and "patients: " in refused.err and "labels: " in refused.err
    assert run(*init_words(planned, site, secret, id="South")).code == 3
    assert run(*init_words(planned, secret, secret)).code == 2
    assert not site.exists()


def test_silo_init_twice_overwrites_nothing_and_one_cut_short_is_finished_with_the_same_keys(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path
) -> None:
    site = tmp_path / "south"
    words = init_words(planned, tmp_path / "south", secret)
    assert run(*words).code == 0
    names = ("private/silo.key", "courier/node.key", "courier/node.pub")
    keys = [(site / name).read_bytes() for name in names]
    assert run(*words).code == 6
    for late in ("silo.toml", "courier/node.pub"):
        (site / late).unlink()
    (tmp_path / "wrong").write_text("another correct horse\n")
    refused = run(*init_words(planned, site, tmp_path / "wrong"))
    assert refused.code == 5
    assert "cut short" in refused.err
    assert run(*words).code == 0
    assert [(site / name).read_bytes() for name in names] == keys


def test_aggregator_init_twice_overwrites_nothing_and_one_cut_short_leaves_no_half(
    run: Run, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = tmp_path / "fed"
    words = (
        "aggregator",
        "init",
        fed,
        "--name",
        "tiny",
        "--licence",
        "CC-BY-4.0",
        "--address",
        "127.0.0.1:9092",
        "--passphrase-file",
        secret,
    )

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("aggregator.setup.make_tls", interrupted)
        with pytest.raises(SystemExit) as ended:
            run_app(APPS["aggregator"], [str(word) for word in words[1:]])
    assert ended.value.code == 130
    assert not (fed / "keys").exists()
    assert run(*words).code == 0
    key = (fed / "keys" / "root.key").read_bytes()
    assert run(*words).code == 6
    assert (fed / "keys" / "root.key").read_bytes() == key
    assert not (fed / ".part").exists()


@pytest.mark.parametrize(
    "address",
    [
        "9092",
        "localhost",
        "localhost:0",
        "localhost:99999",
        "http://a:1",
        "[::1]:9092",
        "300.1.2.3:9092",
        "1.2.3:9092",
        "fed..example.org:9092",
        "fed-.example.org:9092",
        f"{'a' * 64}.example.org:9092",
    ],
)
def test_aggregator_init_names_the_address_when_it_is_none(
    run: Run, secret: Path, tmp_path: Path, address: str
) -> None:
    words = (
        "aggregator",
        "init",
        tmp_path / "fed",
        "--name",
        "a",
        "--licence",
        "CC-BY-4.0",
        "--address",
        address,
        "--passphrase-file",
        secret,
    )
    result = run(*words)
    assert result.code == 3
    assert "--address" in result.err
    assert not (tmp_path / "fed").exists()


def test_card_is_refused_when_tampered_or_clashing_and_welcome_twice(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path
) -> None:
    enroll = ("aggregator", "enroll", "--yes", planned.federation.path)
    card = planned.path / "north.card.json"
    (tmp_path / "tampered.json").write_text(card.read_text().replace("north", "south"))
    assert run(*enroll, tmp_path / "tampered.json").code == 11
    assert run(*enroll, planned.path / "north.npz").code == 21
    assert run(*enroll, card).code == 0
    assert run(*init_words(planned, tmp_path / "new", secret, id="north")).code == 0
    write_policy(Site(tmp_path / "new"), POLICY)
    assert run("silo", "enroll", tmp_path / "new", "--out", tmp_path / "new.json").code == 0
    assert run(*enroll, tmp_path / "new.json").code == 6


# Configuration


@pytest.mark.parametrize(
    ("name", "old", "new", "field"),
    [
        ("silo.toml", "accumulate = 1", 'accumulate = "many"', "training.accumulate"),
        ("silo.toml", "accumulate", "acumulate", "acumulate"),
        ("silo.toml", "silo_id", "# silo_id", "silo_id"),
        ("silo.toml", "accumulate = 1", "accumulate = ", "line"),
        ("policy.toml", "required", "requird", "audit.requird"),
        ("policy.toml", "max_epsilon = 8.0", "max_epsilon = nan", "privacy.max_epsilon"),
    ],
)
def test_message_names_the_file_and_the_field_when_configuration_is_broken(
    run: Run, planned: TinyFederation, secret: Path, name: str, old: str, new: str, field: str
) -> None:
    site = planned.sites["north"].path
    edit(site / name, old, new)
    result = run("silo", "run", site, "--only", "worker", "--passphrase-file", secret)
    assert result.code == 3
    assert str(site / name) in result.err
    assert field in result.err


def plan_words(tiny: TinyFederation, secret: Path, tmp_path: Path, **replace: str) -> list[object]:
    """The words of `aggregator plan`, its recipe changed at one place."""
    text = tomli_w.dumps(recipe().model_dump(mode="json", exclude_none=True))
    for old, new in replace.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "plan.toml").write_text(text)
    np.savez(tmp_path / "public.npz", images=images(120, 0.0, seed=1))
    options = [
        "--recipe",
        tmp_path / "plan.toml",
        "--public",
        tmp_path / "public.npz",
        "--passphrase-file",
        secret,
    ]
    return ["aggregator", "plan", tiny.federation.path, *options]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("num_fine", "num_fein", "clustering.num_f"),
        ('"dit"', '"vit"', "any of the expected tags: 'dit', 'mmdit', 'unet'"),
        ("patch = 2", "patch = 3", "patch"),
        ("heads = 2", "heads = 3", "heads"),
    ],
)
def test_plan_names_what_is_wrong_with_the_recipe(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path, old: str, new: str, says: str
) -> None:
    result = run(*plan_words(planned, secret, tmp_path, **{old: new}), "--yes")
    assert result.code == 3
    assert says in result.err
    assert "plan.toml" in result.err


def test_plan_needs_silos_and_a_person_or_yes(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path
) -> None:
    before = planned.federation.current_plan()
    result = run(*plan_words(planned, secret, tmp_path))
    assert result.code == 3
    assert "epsilon 8" in result.out
    assert "--yes" in result.err
    for card in planned.federation.registry.glob("*.json"):
        card.unlink()
    assert run(*plan_words(planned, secret, tmp_path), "--yes").code == 3
    assert planned.federation.current_plan() == before


# Too early, too late, twice


def test_commands_say_what_comes_first_when_given_too_early(
    run: Run, planned: TinyFederation, secret: Path, tmp_path: Path
) -> None:
    fed = planned.federation.path
    site = planned.sites["east"].path
    assert "silo join" in run("silo", "status", tmp_path / "absent").err
    assert "aggregator init" in run("aggregator", "router", tmp_path / "absent").err
    assert "aggregator run" in run("aggregator", "router", fed).err
    publish = (
        "aggregator",
        "publish",
        fed,
        "--rehearsal",
        "--out",
        tmp_path / "release",
        "--passphrase-file",
        secret,
    )
    assert "aggregator run" in run(*publish).err
    assert run("silo", "status", site).out.startswith("east: waiting")
    assert run("silo", "review", site).code == 3
    assert run("silo", "approve", site, "--digest", "0" * 64).code == 34
    shutil.rmtree(fed / "plans")
    result = run("aggregator", "run", fed, "--passphrase-file", secret)
    assert result.code == 4
    assert "aggregator plan" in result.err


def test_publish_never_touches_what_is_there(
    run: Run, published: PublishedRelease, secret: Path
) -> None:
    before = {path: path.read_bytes() for path in published.release.rglob("*") if path.is_file()}
    fed = published.tiny.federation.path
    assert (
        run(
            "aggregator",
            "publish",
            fed,
            "--rehearsal",
            "--out",
            published.release,
            "--passphrase-file",
            secret,
        ).code
        == 6
    )
    assert {
        path: path.read_bytes() for path in published.release.rglob("*") if path.is_file()
    } == before


@pytest.mark.parametrize("program", ["aggregator", "ddm", "silo"])
def test_every_program_prints_the_version_that_the_project_states(program: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    shown = run_command(program, "--version")
    assert shown.code == 0, shown.err
    assert shown.out == f"{project['project']['version']}\n"


def test_aggregator_run_names_a_busy_port_and_starts_nothing(
    run: Run, planned: TinyFederation, secret: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        edit(planned.federation.path / "federation.toml", "9092", str(port))
        before = set(descendants(os.getpid()))
        result = run("aggregator", "run", planned.federation.path, "--passphrase-file", secret)
    assert result.code == 6
    assert f"port {port}" in result.err
    assert "aggregator invite" in result.err
    assert set(descendants(os.getpid())) <= before


# The researcher


@pytest.fixture
def look(published: PublishedRelease, tmp_path: Path) -> list[object]:
    """The options that every command of `ddm` takes."""
    return [published.release, "--root", published.root, "--state", tmp_path / "state"]


def test_verify_pins_a_silo_key_and_refuses_another(
    run: Run, published: PublishedRelease, look: list[object]
) -> None:
    keys = verify_release(published.release, published.root.read_bytes(), state=None).silo_keys
    result = run("ddm", "verify", *look, "--silo-key", f"north={keys['north'].upper()}")
    assert result.code == 0
    assert "by the key you pinned" in result.out
    assert run("ddm", "verify", *look, "--silo-key", f"north={keys['east']}").code == 11
    assert run("ddm", "verify", *look, "--silo-key", "north").code == 3
    twice = [f"--silo-key=north={keys[silo]}" for silo in ("east", "north")]
    assert run("ddm", "verify", *look, *twice).code == 3
    assert run("ddm", "verify", *look, "--silo-key", f"south={keys['east']}").code == 17


def test_verify_refuses_an_older_release_served_to_the_same_state(
    run: Run, published: PublishedRelease, look: list[object], tmp_path: Path
) -> None:
    published.tiny.publish(tmp_path / "newer")
    assert run("ddm", "verify", tmp_path / "newer", *look[1:]).code == 0
    assert run("ddm", "verify", *look).code == 13


def test_expired_timestamp_is_refused_and_loud_when_archived(
    run: Run,
    published: PublishedRelease,
    look: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = tmp_path / "old"
    monkeypatch.setattr("ddm.publishing.staging.now_utc", lambda: now_utc() - timedelta(days=200))
    with pytest.raises(ExpiredError):
        # an aggregator whose clock is off does not publish what nobody would accept
        published.tiny.publish(old)
    publish_unchecked(monkeypatch)
    published.tiny.publish(old)
    assert run("ddm", "verify", old, *look[1:]).code == 14
    result = run("ddm", "verify", old, *look[1:], "--archived")
    assert result.code == 50
    assert "WARNING" in result.err


def test_verify_names_the_folder_when_its_memory_cannot_be_written(
    run: Run, published: PublishedRelease, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = run(
        "ddm", "verify", published.release, "--root", published.root, "--state", tmp_path / "file"
    )
    assert result.code in (2, 3)
    assert str(tmp_path / "file") in result.err


def test_sample_explains_a_prior_that_is_none(run: Run, look: list[object], tmp_path: Path) -> None:
    for prior in ["", "south=1", "north", "north=-1", "north=nan", "north=0", "north=1,north=2"]:
        with case(prior=prior):
            result = run(
                "ddm",
                "sample",
                *look,
                "--num",
                1,
                "--steps",
                1,
                "--prior",
                prior,
                "--out",
                tmp_path / "a.png",
            )
            assert result.code == 3
            assert "--prior" in result.err
            assert not (tmp_path / "a.png").exists()


def test_sample_refuses_an_odd_name_before_it_works(
    run: Run, look: list[object], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for name in ("a.jpg", "file", "folder.png"):
        result = run("ddm", "sample", *look, "--num", 1, "--steps", 1, "--out", tmp_path / name)
        assert result.code == 3
        assert "sampling" not in result.out
    result = run(
        "ddm", "sample", *look, "--num", 1, "--steps", 1, "--out", tmp_path / "file" / "a.png"
    )
    assert result.code == 8
    assert "sampling" not in result.out


@pytest.mark.parametrize("strategy", ["full", "sample", "lock", "top-1"])
def test_same_command_gives_the_same_bytes_and_sample_i_is_the_same_for_any_num_up_to_rounding(
    run: Run, look: list[object], tmp_path: Path, strategy: str
) -> None:
    words = ("ddm", "sample", *look, "--steps", 2, "--strategy", strategy, "--seed", 7)
    for name, num in (
        ("three.npz", 3),
        ("again.npz", 3),
        ("seventy.npz", 70),
        ("few", 3),
        ("many", 70),
    ):
        assert run(*words, "--num", num, "--out", tmp_path / name).code == 0
    assert (tmp_path / "three.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()
    three = np.load(tmp_path / "three.npz")["images"]
    seventy = np.load(tmp_path / "seventy.npz")["images"]
    assert three.dtype == np.float32
    assert np.allclose(three, seventy[:3], rtol=0, atol=2e-5)
    assert not np.allclose(three[0], three[1], rtol=0, atol=2e-5)
    for name in ("00000.png", "00002.png"):
        few, many = (
            np.asarray(Image.open(tmp_path / folder / name)).astype(int)
            for folder in ("few", "many")
        )
        assert abs(few - many).max() <= 1


@pytest.mark.parametrize("strategy", ["full", "sample", "lock", "top-1", "nucleus"])
def test_with_batch_1_sample_i_has_the_same_bytes_for_any_num(
    run: Run, look: list[object], tmp_path: Path, strategy: str
) -> None:
    words = (
        "ddm",
        "sample",
        *look,
        "--steps",
        2,
        "--strategy",
        strategy,
        "--seed",
        7,
        "--set",
        "batch=1",
    )
    words = (*words, "--set", "mass=0.9") if strategy == "nucleus" else words
    images = {}
    for num in (1, 3, 20):
        assert run(*words, "--num", num, "--out", tmp_path / f"{num}.npz").code == 0
        images[num] = np.load(tmp_path / f"{num}.npz")["images"]
    assert images[1].tobytes() == images[20][:1].tobytes()
    assert images[3].tobytes() == images[20][:3].tobytes()


def test_full_disk_leaves_the_old_samples_whole(
    run: Run, look: list[object], tmp_path: Path
) -> None:
    out = tmp_path / "a.npz"
    words = (*look, "--steps", 1, "--out", out)
    assert run("ddm", "sample", *words, "--num", 2).code == 0
    before = out.read_bytes()

    def sample_on_a_full_disk() -> None:
        # The limit holds for this process, whose output goes into a file as well.
        errors = io.StringIO()
        with redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            run_app(APPS["ddm"], ["sample", *map(str, words), "--num", "128"])
        assert ended.value.code == 8
        assert "room" in errors.getvalue()

    assert wait_for_exit(fork_process(sample_on_a_full_disk)) == 0
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))


# Signals and pipes, to real processes


def start(*words: object) -> "subprocess.Popen[str]":
    """Start an installed command, its output in one pipe."""
    return subprocess.Popen(
        [str(program(str(words[0]))), *(str(word) for word in words[1:])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def until(process: "subprocess.Popen[str]", text: str) -> list[str]:
    """Read lines until one holds `text`."""
    lines: list[str] = []
    assert process.stdout
    while line := process.stdout.readline():
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")
def test_silo_run_ends_on_a_signal_with_its_courier_and_goes_on_where_it_stopped(
    planned: TinyFederation, secret: Path
) -> None:
    site = planned.sites["north"].path
    edit(site / "silo.toml", "9092", str(free_port()))
    steps: list[int] = []
    for words, number, code in (
        (("silo", "run", site), signal.SIGINT, 130),
        (("silo", "run", site, "--only", "worker"), signal.SIGTERM, 143),
    ):
        process = start(*words, "--passphrase-file", secret)
        steps.append(int(until(process, " steps")[-1].split()[2].partition("/")[0]))
        while not list(site.glob("private/checkpoints/*/experts/*/training/*")):
            assert process.poll() is None
        children = descendants(process.pid)
        assert bool(children) == ("--only" not in words)
        process.send_signal(number)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code
        assert "The same command goes on" in said
        assert "Traceback" not in said
        assert not [pid for pid in children if is_running(pid)]
        assert '"training"' in (site / "private" / "state.json").read_text()
    assert steps[1] >= steps[0] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="process trees are read from /proc")
def test_silo_run_killed_in_training_goes_on_from_its_checkpoint_when_it_is_run_again(
    planned: TinyFederation, secret: Path
) -> None:
    """The tutorial's promise: kill -9, and the same command again continues where it stopped."""
    site = planned.sites["north"]
    edit(site.path / "silo.toml", "9092", str(free_port()))
    # By the clock: less than the ten seconds after which the first checkpoint is due by default.
    set_training(site, checkpoint_s=0.3)
    command = ("silo", "run", site.path, "--passphrase-file", secret)
    killed = start(*command)
    until(killed, " steps")
    wait_until(lambda: last_saved_step(site) > 0 or killed.poll() is not None, "a checkpoint")
    children = descendants(killed.pid)
    killed.kill()
    killed.communicate(timeout=LIMIT_S)
    wait_until(lambda: not any(map(is_running, children)), "the end of its courier")
    saved_step = last_saved_step(site)
    again = start(*command)
    # First it says again what it had reported last.
    until(again, " steps")
    step = int(until(again, " steps")[-1].split()[2].partition("/")[0])
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=LIMIT_S)
    assert step > saved_step > 0
    assert last_saved_step(site) >= step, "SIGTERM saves a checkpoint at once"


def last_saved_step(site: Site) -> int:
    """The step of the newest checkpoint of a site's training; 0 where there is none."""
    names = site.private.glob("checkpoints/*/experts/*/training/checkpoints/step-*.json")
    return max((int(path.stem.removeprefix("step-")) for path in names), default=0)


def test_ddm_ends_quietly_when_its_reader_leaves_and_when_interrupted(
    published: PublishedRelease, tmp_path: Path
) -> None:
    look = [published.release, "--root", published.root, "--state", tmp_path / "state"]
    info = start("ddm", "info", *look, "--json")
    assert info.stdout
    info.stdout.close()
    sample = start(
        "ddm", "sample", *look, "--num", 64, "--steps", 10_000, "--out", tmp_path / "a.png"
    )
    until(sample, "sampling")
    sample.send_signal(signal.SIGINT)
    said, _ = sample.communicate(timeout=LIMIT_S)
    assert sample.returncode == 130
    assert "Traceback" not in said
    assert not (tmp_path / "a.png").exists()
    assert info.wait(timeout=LIMIT_S) == 0


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from ddm.system.entry_points import {command}
sys.argv = ["{command}", "--help"]
{command}()
"""


@pytest.mark.parametrize("command", ["ddm", "silo", "aggregator"])
def test_interrupt_while_a_command_is_imported_is_answered_in_one_line(command: str) -> None:
    for number, code in ((int(signal.SIGINT), 130), (0, 0)):  # signal 0 is none
        text = INTERRUPTED.format(module="click", number=number, command=command)
        result = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False
        )
        assert result.returncode == code
        assert ("Interrupted" in result.stderr) == bool(number)
        assert "Traceback" not in result.stderr


ENDED = """
import atexit, os, sys, types
class Late:
    def __del__(self):
        os.kill(os.getpid(), {number})  # when Python has taken its own handlers down
def main():
    module.late = Late()
    atexit.register(os.kill, os.getpid(), {number})
    sys.exit(7)
module = types.ModuleType("silo.cli")
module.main = main
sys.modules["silo.cli"] = module
from ddm.system.entry_points import silo
silo()
"""


def test_interrupt_of_a_command_that_has_ended_changes_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ENDED.format(number=int(signal.SIGINT))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")


def test_make_explains_an_old_and_a_missing_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1" || exit 1\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "torch.lock", "torch-cpu.lock"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for python, says in ((old, "Python 3.8.1"), ("python-that-is-not-there", "not there")):
        result = subprocess.run(
            ["make", "setup", f"PYTHON={python}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2
        assert "needs Python 3.11 or newer" in result.stdout
        assert says in result.stdout
        assert "make setup PYTHON=" in result.stdout
    assert not (tmp_path / ".venv").exists()
