"""An aggregator that shows two histories: caught by a reader who remembers, and by readers who compare.

The attacker holds every key of the federation. Each fork is published by the federation's own code on a copy of its
folder, with version numbers of TUF that are higher than the honest ones, so that only the log tells them apart.
"""

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aggregator.config import Federation, FederationSettings
from aggregator.keys.rotation import rotate_key
from aggregator.release.publish import publish
from ddm.cli.main import app
from ddm.errors import ArchipelagoError, SetupError, SplitViewError, TrustError
from ddm.io.settings import load_settings, save_settings
from ddm.loading.log import entry_of
from ddm.protocol.base import now_utc
from ddm.publishing import plans as publishing_plans
from ddm.publishing import signing as publishing_signing
from ddm.publishing.keys import load_key
from ddm.publishing.log import CHECKPOINT, ENTRIES
from ddm.publishing.public_log import public_folder
from ddm.trust.log.checkpoint import open_checkpoint
from ddm.trust.log.entries import PlanSigned
from ddm.trust.log.note import VerifierKey
from ddm.trust.log.proof import InclusionProof
from ddm.trust.repository import Repository
from ddm.trust.rules import trusted_log_keys
from silo.config import Policy, Site
from silo.plan.acceptance import receive_plan
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE
from tests.support.federation_keys import KeyedFederation
from tests.support.publishing import publish_short_pages, publish_unchecked


@dataclass(frozen=True)
class Histories:
    """What two groups of readers are shown.

    Attributes:
        folder: holds `first`, which everybody has seen; `honest`, and one release for each way of forking.
        root: what everybody pinned.
        plan_id: the plan.
        log: the honest public log.
    """

    folder: Path
    root: Path
    plan_id: str
    log: Path

    def proof(self, name: str) -> Path:
        """The proof in a release, which ends with its checkpoint."""
        return self.folder / name / "targets" / self.plan_id / "manifest.tlog-proof"


def cited(federation: Federation, citation: str) -> None:
    """Change what the next manifest says."""
    path = federation.path / "federation.toml"
    save_settings(
        load_settings(FederationSettings, path).model_copy(update={"cite": citation}),
        path,
        "edited",
    )


def rewrite(federation: Federation, edit: Callable[[list[bytes]], list[bytes]]) -> None:
    """Edit the log on disk and forget what was signed: its key is at hand, so that nothing here can stop this."""
    entries = federation.path / ENTRIES
    entries.write_bytes(b"".join(edit(entries.read_bytes().splitlines(keepends=True))))
    (federation.path / CHECKPOINT).unlink()
    shutil.rmtree(public_folder(federation))


def other_manifest(lines: list[bytes]) -> list[bytes]:
    """A version that everybody has seen never had this manifest."""
    at = next(number for number, line in enumerate(lines) if b'"kind":"release"' in line)
    entry = json.loads(lines[at]) | {"manifest_digest": "0" * 64}
    return [
        *lines[:at],
        json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n",
        *lines[at + 1 :],
    ]


def no_rotation(lines: list[bytes]) -> list[bytes]:
    """Nobody ever replaced the key that was stolen."""
    last = max(number for number, line in enumerate(lines) if b'"key":"release"' in line)
    return lines[:last] + lines[last + 1 :]


@pytest.fixture(scope="module")
def histories(
    published_once: PublishedRelease, tmp_path_factory: pytest.TempPathFactory
) -> Histories:
    folder = tmp_path_factory.mktemp("histories")
    honest = Federation(folder / "fed")
    shutil.copytree(published_once.tiny.federation.path, honest.path)
    shutil.copytree(published_once.release, folder / "first")
    with pytest.MonkeyPatch.context() as patch:
        publish_short_pages(patch)
        rotate_key(honest, "release", PASSPHRASE)
        for name, edit in (
            ("forked", None),
            ("rewritten", other_manifest),
            ("key-dropped", no_rotation),
        ):
            fork = Federation(folder / f"fed-{name}")
            shutil.copytree(honest.path, fork.path)
            if edit:
                rewrite(fork, edit)
            cited(fork, f"paper of {name}")
            sign_more_versions(fork)
            publish(fork, PASSPHRASE, folder / name, rehearsal=True, renew=True)
        publish(
            Federation(folder / "fed-forked"),
            PASSPHRASE,
            folder / "forked-later",
            rehearsal=True,
            renew=True,
        )
        publish(honest, PASSPHRASE, folder / "honest", rehearsal=True, renew=True)
    return Histories(folder, published_once.root, published_once.plan_id, public_folder(honest))


def sign_more_versions(federation: Federation) -> None:
    """TUF's numbers of the next release will be higher than the honest ones."""
    keys = {f"{name}_key": load_key(federation, name, PASSPHRASE) for name in ("release", "online")}
    Repository(federation.tuf).renew(**keys, now=now_utc())


FORKS = ("forked", "rewritten", "key-dropped")


def ddm(*words: object) -> BaseException | None:
    """Run the real command; return how it ended, None for well."""
    return CliRunner().invoke(app, list(map(str, words))).exception


def verify(histories: Histories, name: str, state: Path, *more: object) -> BaseException | None:
    return ddm("verify", histories.folder / name, "--root", histories.root, "--state", state, *more)


def test_honest_history_is_accepted_by_memory_and_by_comparison(
    histories: Histories, tmp_path: Path
) -> None:
    """The control, and each fork by itself is a perfect release: nothing but a second look tells."""
    for name in ("first", "honest"):
        assert verify(histories, name, tmp_path / "reader") is None
    for name in ("first", "honest"):
        error = verify(
            histories, "honest", tmp_path / "other", "--checkpoint", histories.proof(name)
        )
        assert error is None
    for name in FORKS:
        with case(name=name):
            assert verify(histories, name, tmp_path / f"victim of {name}") is None


def test_reader_who_remembers_catches_the_second_history(
    histories: Histories, tmp_path: Path
) -> None:
    for name in FORKS:
        with case(name=name):
            state = tmp_path / name
            assert verify(histories, "honest", state) is None
            error = verify(histories, name, state)
            assert isinstance(error, SplitViewError)
            assert error.exit_code == 27
            (evidence,) = state.glob("*/split-view-*")
            assert str(evidence) in error.remedy
            seen, shown = (
                open_checkpoint(
                    (evidence / f"{which}.checkpoint").read_bytes(), log_keys(histories), which
                )
                for which in ("seen", "shown")
            )
            assert (
                seen.encode()
                == InclusionProof.parse(histories.proof("honest").read_bytes(), "proof").checkpoint
            )
            assert (
                shown.encode()
                == InclusionProof.parse(histories.proof(name).read_bytes(), "proof").checkpoint
            )
            # A refused history is not remembered: the honest one is still accepted.
            assert verify(histories, "honest", state) is None


def log_keys(histories: Histories) -> list[VerifierKey]:
    root = histories.root.read_bytes()
    return [VerifierKey.parse(key) for key in trusted_log_keys({"1.root.json": root}, root, {})]


def test_rewritten_past_is_caught_by_a_reader_who_has_not_followed_for_long(
    histories: Histories, tmp_path: Path
) -> None:
    assert verify(histories, "first", tmp_path) is None
    assert isinstance(verify(histories, "rewritten", tmp_path), SplitViewError)


def test_two_readers_who_compare_catch_two_histories_whoever_has_which(
    histories: Histories, tmp_path: Path
) -> None:
    pairs = [("honest", "forked"), ("honest", "rewritten"), ("honest", "key-dropped")]
    pairs += [
        ("forked", "honest"),
        ("forked-later", "honest"),
        ("rewritten", "honest"),
        ("rewritten", "first"),
    ]
    for mine, theirs in pairs:
        with case(mine=mine, theirs=theirs):
            state = tmp_path / f"{mine} and {theirs}"
            error = verify(histories, mine, state, "--checkpoint", histories.proof(theirs))
            assert isinstance(error, SplitViewError)
            assert list(state.glob("*/split-view-*/shown.checkpoint"))
    later = verify(
        histories, "honest", tmp_path / "x", "--checkpoint", histories.proof("forked-later")
    )
    assert isinstance(later, TrustError), "this release cannot know the later log"
    assert "ddm log" in later.remedy
    same = verify(
        histories, "forked-later", tmp_path / "y", "--checkpoint", histories.proof("forked")
    )
    assert same is None, "the control: one history, as far as these two go"


def test_history_that_a_comparison_refused_is_not_remembered(
    histories: Histories, tmp_path: Path
) -> None:
    """The attack: a first visit to the forked log, where nothing but another reader's checkpoint tells."""
    state = tmp_path / "reader"
    error = verify(histories, "forked", state, "--checkpoint", histories.proof("honest"))
    assert isinstance(error, SplitViewError)
    assert not list(state.glob("*/*.json"))
    assert verify(histories, "honest", state) is None
    assert isinstance(verify(histories, "forked", state), SplitViewError)


def test_second_history_is_refused_as_such_although_its_evidence_cannot_be_kept(
    histories: Histories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told to name another memory instead would accept it there."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert verify(histories, "honest", tmp_path) is None
    monkeypatch.setattr("ddm.trust.log.checkpoint_store.write_atomic", full)
    error = verify(histories, "forked", tmp_path)
    assert isinstance(error, SplitViewError)
    assert "Keep a copy" in error.remedy
    assert "--state" not in error.remedy


def test_whole_log_is_held_against_any_checkpoint(histories: Histories, tmp_path: Path) -> None:
    command = ("log", histories.log, "--root", histories.root, "--state", tmp_path)
    assert (
        ddm(
            *command,
            "--checkpoint",
            histories.proof("first"),
            "--checkpoint",
            histories.proof("honest"),
        )
        is None
    )
    for name in FORKS:
        with case(name=name):
            error = ddm(*command, "--checkpoint", histories.proof(name))
            assert isinstance(error, SplitViewError)
    assert len(list(tmp_path.glob("*/split-view-*"))) == len(FORKS)


def test_reader_who_remembers_catches_the_log_of_a_second_history(
    histories: Histories, tmp_path: Path
) -> None:
    for name in FORKS:
        with case(name=name):
            state = tmp_path / name
            assert verify(histories, name, state) is None
            command = ("log", histories.log, "--root", histories.root, "--state", state)
            assert isinstance(ddm(*command), SplitViewError)


def test_copy_of_the_log_with_any_changed_file_is_refused(
    histories: Histories, tmp_path: Path
) -> None:
    files = [path for path in histories.log.rglob("*") if path.is_file()]
    current = [path for path in files if is_read(histories, path)]
    assert len(current) >= 3
    for number, path in enumerate(current):
        copy = tmp_path / str(number)
        shutil.copytree(histories.log, copy)
        data = bytearray((copy / path.relative_to(histories.log)).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / path.relative_to(histories.log)).write_bytes(bytes(data))
        with case(path=path.name):
            assert isinstance(
                ddm("log", copy, "--root", histories.root, "--state", tmp_path), ArchipelagoError
            )


def is_read(histories: Histories, path: Path) -> bool:
    """Whether a whole check reads this file: not the tiles of earlier checkpoints, nor the pinned root's copy."""
    size = (histories.log / "checkpoint").read_text().splitlines()[1]
    return path.name in (size, "checkpoint")


def test_manifest_that_is_not_in_the_log_is_not_published_and_not_read(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the log gets another manifest than readers."""
    publish_short_pages(monkeypatch)
    monkeypatch.setattr(
        publishing_signing, "entry_of", lambda manifest, digest: entry_of(manifest, "0" * 64)
    )
    with pytest.raises(TrustError, check=has_subject("manifest.tlog-proof")):
        publish(published.tiny.federation, PASSPHRASE, tmp_path / "out", rehearsal=True, renew=True)
    assert not (tmp_path / "out").exists()
    publish_unchecked(monkeypatch)
    publish(published.tiny.federation, PASSPHRASE, tmp_path / "out", rehearsal=True, renew=True)
    error = ddm("verify", tmp_path / "out", "--root", published.root, "--state", tmp_path)
    assert isinstance(error, TrustError)


def test_federation_restored_from_an_old_backup_does_not_overwrite_its_public_log(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest operator's mistake that would look like an attack."""
    from ddm.publishing.public_log import export_log

    publish_short_pages(monkeypatch)
    federation = published.tiny.federation
    backup = tmp_path / "backup"
    shutil.copytree(federation.path, backup)
    publish(federation, PASSPHRASE, tmp_path / "out", rehearsal=True, renew=True)
    export_log(federation, tmp_path / "served")
    with pytest.raises(SetupError, check=has_subject("checkpoint")):
        export_log(Federation(backup), tmp_path / "served")


def test_silo_that_remembers_refuses_the_plan_of_a_second_history(tmp_path: Path) -> None:
    keyed = KeyedFederation(tmp_path / "operator")
    keyed.found()
    for silo_id in ("east", "north"):
        keyed.enroll(silo_id)
    fork = keyed.copy(tmp_path / "fork")
    keyed.plan(1)
    site = Site(tmp_path / "north")
    site.make_folders()
    site.root_path.write_bytes(keyed.root)

    def offer(operator: KeyedFederation, number: int) -> None:
        plan_id = f"digits-{number:08x}"
        shutil.copytree(operator.federation.bundle(plan_id), site.inbox / plan_id / "bundle")
        key = keyed.silos["north"].public
        receive_plan(
            site, plan_id, Policy(), silo_id="north", key=key, max_bytes=1 << 20, now=now_utc()
        )

    # nobody could carry it out, which is found after its signatures and its proof
    with suppress(ArchipelagoError):
        offer(keyed, 1)
    for number in (2, 3):
        fork.plan(number)
    with pytest.raises(SplitViewError):
        offer(fork, 3)
    keyed.plan(4)
    with pytest.raises(ArchipelagoError) as refused:
        offer(keyed, 4)
    assert not isinstance(refused.value, TrustError), "the control: the honest log goes on"


def test_plan_that_is_not_in_the_log_is_refused_by_a_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def other(plan_id: str, plan_digest: str) -> object:
        return PlanSigned(plan_id=plan_id, plan_digest="0" * 64)

    keyed = KeyedFederation(tmp_path / "operator")
    keyed.found()
    for silo_id in ("east", "north"):
        keyed.enroll(silo_id)
    monkeypatch.setattr(publishing_plans, "PlanSigned", other)
    keyed.plan(1)
    site = Site(tmp_path / "north")
    site.make_folders()
    site.root_path.write_bytes(keyed.root)
    shutil.copytree(
        keyed.federation.bundle("digits-00000001"), site.inbox / "digits-00000001" / "bundle"
    )
    key = keyed.silos["north"].public
    with pytest.raises(TrustError, check=has_subject("plan/plan.tlog-proof")):
        receive_plan(
            site,
            "digits-00000001",
            Policy(),
            silo_id="north",
            key=key,
            max_bytes=1 << 20,
            now=now_utc(),
        )
