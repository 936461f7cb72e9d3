"""A version from which a silo has withdrawn since, or its experts in a new one: who refuses them, and by what."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from ddm.errors import ExpiredError, RollbackError, TrustError
from ddm.protocol.base import now_utc
from ddm.publishing.public_log import public_folder
from ddm.trust.repository import Repository
from ddm.trust.verify import verify_release
from tests.conftest import PublishedRelease
from tests.support.commands import CommandResult, run_command
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE
from tests.support.publishing import publish_short_pages


@pytest.fixture
def withdrawn(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PublishedRelease:
    """The first version, of east and north, and `second` beside it, from which east has withdrawn."""
    publish_short_pages(monkeypatch)
    secret = tmp_path / "pass"
    secret.write_bytes(PASSPHRASE + b"\n")
    words = ("--reason", "asked us to", "--passphrase-file", secret)
    result = run_command("aggregator", "withdraw", published.tiny.federation.path, "east", *words)
    assert result.code == 0, result.err
    published.tiny.publish(published.tiny.path / "second")
    return published


def verify(
    release: Path, withdrawn: PublishedRelease, state: Path, *words: object
) -> CommandResult:
    return run_command("ddm", "verify", release, "--root", withdrawn.root, "--state", state, *words)


def test_version_from_which_a_silo_withdrew_is_refused_by_whoever_knows_of_a_later_one(
    withdrawn: PublishedRelease, tmp_path: Path
) -> None:
    """The attack: a host, or the aggregator itself, goes on serving the first version as it was."""
    second = withdrawn.tiny.path / "second"
    assert verify(second, withdrawn, tmp_path / "state").code == 0
    refused = verify(withdrawn.release, withdrawn, tmp_path / "state")
    assert refused.code == RollbackError.exit_code, refused
    # Whoever never saw the second version has its checkpoint, or that of the public log, from somebody who did.
    proof = second / "targets" / withdrawn.plan_id / "manifest.tlog-proof"
    for checkpoint in (proof, public_folder(withdrawn.tiny.federation) / "checkpoint"):
        words = ("--checkpoint", checkpoint)
        refused = verify(withdrawn.release, withdrawn, tmp_path / "new", *words)
        assert refused.code == TrustError.exit_code, refused
        assert checkpoint.name in refused.err
    # Whoever has neither is shown the first version for 90 days at most.
    with pytest.raises(ExpiredError, check=has_subject("timestamp.json")):
        verify_release(
            withdrawn.release,
            withdrawn.root.read_bytes(),
            state=None,
            now=now_utc() + timedelta(days=91),
        )


def test_withdrawn_silo_that_comes_back_in_the_same_plan_is_refused_by_whoever_saw_it_leave(
    withdrawn: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the aggregator takes the withdrawal back in its own folder, and publishes a third version."""
    tiny = withdrawn.tiny
    assert verify(withdrawn.release, withdrawn, tmp_path / "state").code == 0
    assert verify(tiny.path / "second", withdrawn, tmp_path / "state").code == 0
    record = tiny.federation.withdrawn / withdrawn.plan_id / "east"
    (record / "submission").rename(tiny.federation.accepted / withdrawn.plan_id / "east")
    shutil.rmtree(record)
    monkeypatch.setattr(Repository, "_check_not_older", lambda *arguments: None)
    tiny.publish(tiny.path / "third")

    # Its versions are the highest, its manifest is in the log, and the log has only grown.
    assert verify(tiny.path / "third", withdrawn, tmp_path / "new").code == 0
    refused = verify(tiny.path / "third", withdrawn, tmp_path / "state")
    assert refused.code == RollbackError.exit_code, refused
    assert f"{withdrawn.plan_id}.east.json" in refused.err
    log = ("ddm", "log", public_folder(tiny.federation), "--root", withdrawn.root)
    listed = run_command(*log, "--state", tmp_path / "new").out
    assert listed.index("withdrawn plan_id") < listed.index("version=3")
