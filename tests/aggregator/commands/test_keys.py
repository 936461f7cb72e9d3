"""The commands about keys as people type them: a founding by holders, a plan's worth of signatures, a key lost."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.cli import app
from ddm.system.console import run_app
from tests.support.federation_keys import KeyedFederation

Run = Callable[..., tuple[object, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def command(*words: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as ended:
            run_app(app, [str(word) for word in words])
        output = capsys.readouterr()
        assert "Traceback" not in output.out + output.err
        return ended.value.code, output.out + output.err

    return command


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "passphrase"
    path.write_text("correct horse\n")
    return path


def test_founding_by_holders_and_a_rotation_from_first_to_last_command(
    run: Run, secret: Path, tmp_path: Path
) -> None:
    fed = tmp_path / "fed"
    by = ("--passphrase-file", secret)
    for name in ("ada", "ben", "dan"):
        code, output = run("holder", tmp_path / f"{name}.key", *by)
        assert code == 0
        assert (tmp_path / f"{name}.pub").read_text().startswith("ed25519:")
    assert run("holder", tmp_path / "ada.key", *by)[0] == 3
    named = [
        word for name in ("ada", "ben") for word in ("--root-holder", tmp_path / f"{name}.pub")
    ]
    words = (
        "init",
        fed,
        "--name",
        "tiny",
        "--licence",
        "CC-BY-4.0",
        "--address",
        "127.0.0.1:9092",
        *by,
        *named,
        "--root-threshold",
        2,
    )
    code, output = run(*words, "--targets-holder", tmp_path / "dan.pub")
    assert code == 0
    assert "root-1.json: 0 of 2 signatures" in output
    assert "code of the root" not in output
    assert run("complete", fed, *by)[0] == 3
    for name, document in (("ada", "root"), ("ben", "root"), ("dan", "targets")):
        waiting = fed / "ceremony" / f"{document}-1.json"
        # nobody to confirm
        assert run("sign", waiting, "--key", tmp_path / f"{name}.key", *by)[0] == 3
        code, output = run("sign", waiting, "--key", tmp_path / f"{name}.key", "--yes", *by)
        assert code == 0
        assert output.startswith(f"{document}, version 1 (the first version)")
        assert waiting.with_suffix(".txt").read_text().strip() in output
    assert run("sign", waiting, "--key", tmp_path / "ada.key", "--yes", *by)[0] == 11
    code, output = run("complete", fed, *by)
    assert code == 0
    assert re.search(r"code of the root +([a-z]+ ){5}[a-z]+\n", output)
    assert run("complete", fed, *by)[0] == 4
    assert run("rotate", fed, "root", *by)[0] == 3
    assert run("rotate", fed, "everything", *by)[0] == 3
    code, output = run("rotate", fed, "online", *by)
    assert (code, "root-2.json: 0 of 2 signatures" in output) == (0, True)
    assert run("rotate", fed, "tls", *by)[0] == 6
    code, output = run("complete", fed, "--abandon")
    assert (code, output) == (0, "Discarded: rotate the key online.\n")
    assert run("rotate", fed, "tls", *by)[0] == 0


def test_removal_says_what_follows_for_the_plan(run: Run, secret: Path, tmp_path: Path) -> None:
    keyed = KeyedFederation(tmp_path)
    keyed.found()
    for silo_id in ("east", "north", "west"):
        keyed.enroll(silo_id)
    keyed.plan(1)
    words = ("--reason", "stolen key", "--passphrase-file", secret)
    code, output = run("remove", keyed.federation.path, "west", *words)
    assert (code, "plan" in output) == (0, False)
    code, output = run("remove", keyed.federation.path, "east", *words)
    assert code == 0
    assert "had a part in plan digits-00000001" in output
    assert f"aggregator withdraw {keyed.federation.path} east" in output
    assert run("remove", keyed.federation.path, "south", *words)[0] == 4
