"""`aggregator release`: router and publication in one command, which fails before it has worked for minutes."""

from pathlib import Path

import pytest

from ddm.protocol.base import sha256_hex
from tests.conftest import PublishedRelease
from tests.support.commands import CommandResult, run_command
from tests.support.federation import PASSPHRASE


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(PASSPHRASE + b"\n")
    return path


def release(published: PublishedRelease, out: Path, *words: object) -> CommandResult:
    return run_command(
        "aggregator", "release", published.tiny.federation.path, "--out", out, *words
    )


def test_release_trains_the_router_and_publishes_what_readers_verify(
    published: PublishedRelease, secret: Path, tmp_path: Path
) -> None:
    plan, _ = published.tiny.federation.current_plan()
    router = published.tiny.federation.plan_folder(plan.plan_id) / "router"
    for path in router.rglob("*"):
        if path.is_file():
            path.unlink()
    out = tmp_path / "release"
    result = release(published, out, "--rehearsal", "--passphrase-file", secret)
    assert result.code == 0, result.err
    root = published.tiny.root
    state = tmp_path / "state"
    verified = run_command("ddm", "verify", out, "--root", root, "--state", state)
    assert verified.code == 0, verified.err
    assert sha256_hex(root.read_bytes()) in verified.out


def test_release_refuses_before_it_trains_what_publishing_would_refuse(
    published: PublishedRelease, secret: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("another correct horse\n")
    (tmp_path / "taken").mkdir()
    refusals = {
        "a rehearsal that nobody asked for": (tmp_path / "a", (), secret, 31),
        "a folder that is there": (tmp_path / "taken", ("--rehearsal",), secret, 6),
        "a wrong passphrase": (tmp_path / "b", ("--rehearsal",), tmp_path / "wrong", 5),
        "too few silos": (tmp_path / "b", ("--rehearsal", "--quorum", 9), secret, 31),
    }
    for out, words, passphrase_file, code in refusals.values():
        result = release(published, out, *words, "--passphrase-file", passphrase_file)
        assert result.code == code, result.err
        assert "Training" not in result.out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in "ab") == []
