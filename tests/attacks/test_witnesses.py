"""An aggregator that shows two histories to readers who have never met, and a witness that keeps everybody waiting."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.config import Federation, FederationSettings, WitnessSettings
from aggregator.keys.rotation import rotate_key
from ddm.errors import SignatureError
from ddm.io.settings import load_settings, save_settings
from ddm.publishing.log import TransparencyLog
from ddm.publishing.public_log import public_folder
from ddm.publishing.witnesses import Witness as AskedWitness
from ddm.publishing.witnesses import ask_witnesses
from ddm.trust.drafts import log_key_of
from ddm.trust.log.note import VerifierKey
from ddm.trust.repository import Repository
from tests.conftest import PublishedRelease
from tests.support.commands import CommandResult, run_command
from tests.support.federation import PASSPHRASE
from tests.support.hosts import HostHandler, HostState, serve, trickling, trickling_headers
from tests.support.publishing import publish_short_pages
from tests.support.witness import Witness, run_witness


def published(federation: Federation, server: Witness, passphrase: Path) -> CommandResult:
    """Publish with the witness named in federation.toml."""
    path = federation.path / "federation.toml"
    named = (WitnessSettings(url=server.url, key=server.vkey),)
    save_settings(
        load_settings(FederationSettings, path).model_copy(update={"witnesses": named}),
        path,
        "edited",
    )
    options = ("--out", federation.path / "out", "--renew", "--passphrase-file", passphrase)
    return run_command("aggregator", "publish", federation.path, "--rehearsal", *options)


def test_reader_who_demands_witnesses_refuses_the_history_that_they_did_not_see(
    published_once: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_short_pages(monkeypatch)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    honest = Federation(tmp_path / "fed")
    forked = Federation(tmp_path / "forked")
    shutil.copytree(published_once.tiny.federation.path, honest.path)
    shutil.copytree(honest.path, forked.path)
    log_key = log_key_of(Repository(honest.tuf).root())
    assert log_key is not None
    (tmp_path / "pass").write_bytes(PASSPHRASE)
    with run_witness("witness.example/w1", [log_key]) as server:
        rotate_key(forked, "release", PASSPHRASE)  # the other history has an entry more
        first, second = (
            published(federation, server, tmp_path / "pass") for federation in (honest, forked)
        )
    assert (first.code, "Cosigned by witness.example/w1." in first.out) == (0, True)
    assert (second.code, "witness.example/w1 did not cosign" in second.err) == (0, True), (
        "published all the same"
    )

    def verify(federation: Federation, *checkpoints: Path) -> CommandResult:
        more = [word for path in checkpoints for word in ("--checkpoint", path)]
        options = (
            "--root",
            published_once.root,
            "--state",
            tmp_path / "never seen",
            "--witness",
            server.vkey,
        )
        return run_command("ddm", "verify", federation.path / "out", *options, *more)

    signed = TransparencyLog.load(honest).signed
    assert signed is not None
    cosigned = public_folder(honest) / "cosigned" / str(signed.size)
    assert verify(forked).code == SignatureError.exit_code
    result = verify(forked, public_folder(forked) / "checkpoint")
    assert (result.code, "cosigned/" in result.err) == (SignatureError.exit_code, True)
    assert verify(honest).code == SignatureError.exit_code, "a release has no cosignature in it"
    assert (
        verify(honest, public_folder(published_once.tiny.federation) / "checkpoint").code
        == SignatureError.exit_code
    )
    result = verify(honest, cosigned)
    assert (result.code, "1 of 1 or more cosigned" in result.out) == (0, True)


class _PostHandler(HostHandler):
    """Answers what is asked of a witness."""

    do_POST = HostHandler.do_GET


@pytest.mark.parametrize("answer", [trickling(0.05), trickling_headers(0.05)], ids=["body", "head"])
def test_witness_that_sends_single_bytes_keeps_nobody_waiting_and_the_next_one_cosigns(
    published_once: PublishedRelease,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[HostHandler], None],
) -> None:
    """Each byte ends a wait of a single read, so that limits of reads let such an answer go on for hours."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    honest = Federation(tmp_path / "fed")
    shutil.copytree(published_once.tiny.federation.path, honest.path)
    log_key = log_key_of(Repository(honest.tuf).root())
    assert log_key is not None
    state = HostState(tmp_path, answers={"/add-checkpoint": answer})
    with (
        serve(_PostHandler, state) as slow_url,
        run_witness("witness.example/w1", [log_key]) as server,
    ):
        key = VerifierKey.parse(server.vkey)
        witnesses = [AskedWitness(slow_url, key), AskedWitness(server.url, key)]
        slow, quick = ask_witnesses(honest, witnesses, timeout_s=1.0)
    assert slow.problem is not None
    assert "bytes in 1 seconds" in str(slow.problem)
    assert quick.problem is None
