"""Versions follow each other whole: a crash at any step, two operators at once, a late silo, a quorum."""

import os
import shutil
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import aggregator.release.publish
import ddm.loading.ensemble
import ddm.publishing.drawing
import ddm.publishing.pages
import ddm.publishing.signing
from aggregator.config import FederationSettings
from aggregator.intake.inventory import take_inventory
from aggregator.router.train import train_router
from ddm.errors import (
    BusyError,
    DigestError,
    DiskError,
    MissingFileError,
    PolicyError,
    RollbackError,
    SetupError,
)
from ddm.io.changes import Change, is_unfinished
from ddm.io.settings import load_settings, save_settings
from ddm.loading.public_log import read_public_log
from ddm.loading.release import open_release
from ddm.models import load_expert
from ddm.protocol.base import check_json, sha256_file, sha256_hex
from ddm.publishing.drawing import DrawingEffort
from ddm.publishing.pages import write_pages
from ddm.publishing.public_log import public_folder
from ddm.publishing.staging import StagedVersion
from ddm.publishing.versions import is_current, read_newest
from ddm.trust.log.entries import VersionPublished
from tests.conftest import PublishedRelease
from tests.support.crashes import Crash
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE, PlannedFederation, TinyFederation
from tests.support.forked import fork_process, wait_for_exit
from tests.support.publishing import (
    copy_without_sites,
    file_digests,
    kill_at_step,
    publish_next_version,
    verify_release,
)

pytestmark = pytest.mark.usefixtures("short_pages")


def versions(tiny: TinyFederation) -> list[str]:
    return sorted(path.name for path in tiny.federation.releases.iterdir())


def listed_manifests(tiny: TinyFederation) -> set[str]:
    """The manifests that the federation's present metadata list."""
    data = (tiny.federation.tuf / "release.json").read_bytes()
    targets = check_json(data, subject="release.json", limit=1 << 20)["signed"]["targets"]
    return {
        target["hashes"]["sha256"]
        for name, target in targets.items()
        if name.endswith("/manifest.json")
    }


# Nothing is published twice


def test_same_content_is_copied_out_again_and_makes_no_new_version(
    published: PublishedRelease, tmp_path: Path
) -> None:
    publication = publish_next_version(published.tiny, tmp_path / "same")
    assert (publication.fresh, publication.manifest.version, versions(published.tiny)) == (
        False,
        1,
        ["1"],
    )
    assert file_digests(tmp_path / "same") == file_digests(published.release)
    renewed = publish_next_version(published.tiny, tmp_path / "renewed", renew=True)
    assert (renewed.fresh, renewed.manifest.version) == (True, 2)
    assert verify_release(published, tmp_path / "renewed").manifest == renewed.manifest


def test_changed_content_or_an_aged_timestamp_makes_a_new_version(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(published.tiny, cite="another paper")
    assert publish_next_version(published.tiny, tmp_path / "cite").manifest.version == 2
    assert not publish_next_version(published.tiny, tmp_path / "same").fresh
    monkeypatch.setattr(
        aggregator.release.publish, "RENEWED_BEFORE", aggregator.release.publish.RENEWED_BEFORE * 4
    )
    assert publish_next_version(published.tiny, tmp_path / "aged").manifest.version == 3


def test_rehearsal_is_published_only_where_one_is_meant(
    published: PublishedRelease, tmp_path: Path
) -> None:
    federation = published.tiny.federation
    with pytest.raises(PolicyError, check=has_subject("release")):
        aggregator.release.publish.publish(federation, PASSPHRASE, tmp_path / "out", renew=True)
    assert not (tmp_path / "out").exists()
    plan = published.tiny.federation.current_plan()[0]
    trained = plan.model_copy(update={"rehearsal": False})
    with pytest.raises(PolicyError, check=has_subject("--rehearsal")):
        aggregator.release.publish.check_rehearsal(trained, is_intended=True)
    aggregator.release.publish.check_rehearsal(trained, is_intended=False)


def settle(tiny: TinyFederation, **changes: object) -> None:
    """Edit federation.toml."""
    path = tiny.federation.path / "federation.toml"
    settings = load_settings(FederationSettings, path).model_copy(update=changes)
    save_settings(settings, path, "edited")


def test_metadata_that_were_signed_since_make_a_new_version(
    published: PublishedRelease, tmp_path: Path
) -> None:
    """The control is above: the same content under the same metadata makes none."""
    timestamp = published.tiny.federation.tuf / "timestamp.json"
    timestamp.write_bytes(timestamp.read_bytes() + b" ")
    assert not is_current(published.tiny.federation, 1)


# --out


def test_unusable_out_uses_up_no_version(published: PublishedRelease, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, check=has_subject("--out")):
        publish_next_version(published.tiny, tmp_path / "file" / "release", renew=True)
    with pytest.raises(BusyError):
        publish_next_version(published.tiny, published.release, renew=True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BusyError):
        publish_next_version(published.tiny, tmp_path / "link", renew=True)
    assert versions(published.tiny) == ["1"]
    assert (
        publish_next_version(published.tiny, tmp_path / "deep" / "er", renew=True).manifest.version
        == 2
    )


def test_full_disk_at_out_uses_up_no_version(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        monkeypatch.context() as patch,
        pytest.raises(DiskError, match="1000 bytes free") as refusal,
    ):
        patch.setattr("ddm.io.space.free_bytes", lambda folder: 1000)
        publish_next_version(published.tiny, tmp_path / "out", renew=True)
    assert str(tmp_path) in str(refusal.value) and "for a release" in str(refusal.value)
    assert (versions(published.tiny), list(tmp_path.glob("*out*"))) == (["1"], [])


def test_version_number_of_a_lost_release_is_not_used_again(
    published: PublishedRelease, tmp_path: Path
) -> None:
    publish_next_version(published.tiny, tmp_path / "second", renew=True)
    shutil.rmtree(published.tiny.federation.releases / "2")
    with pytest.raises(SetupError, check=has_subject("releases/")) as refused:
        publish_next_version(published.tiny, tmp_path / "third", renew=True)
    assert "backup" in refused.value.remedy


# Crashes: a process of its own, killed as `kill -9` does, at one of its writes


def check_crash(published: PublishedRelease, folder: Path, step: int) -> bool:
    """Kill publishing at one step, look, publish again, look; tell whether it was killed at all."""
    there = copy_without_sites(published, folder)
    tiny = there.tiny
    out = folder / "out"
    killed = kill_at_step(step, lambda: publish_next_version(tiny, out))
    check_listed(tiny)
    if out.exists():
        assert verify_release(there, out).manifest.version == 2
        shutil.rmtree(out)
    publication = publish_next_version(tiny, out)
    assert (publication.manifest.version, versions(tiny)) == (2, ["1", "2"])
    assert verify_release(there, out).manifest == publication.manifest
    assert file_digests(out) == file_digests(tiny.federation.releases / "2")
    assert not is_unfinished(tiny.federation.path)
    newest = read_newest(tiny.federation)
    assert newest is not None and newest.number == 2
    log = read_public_log(public_folder(tiny.federation), there.root.read_bytes(), folder / "state")
    assert [entry.version for entry in log.entries if isinstance(entry, VersionPublished)] == [
        1,
        2,
    ], "once each, no orphan"
    assert {path.name for path in folder.iterdir()} == {"fed", "out"}
    assert not list(tiny.federation.path.glob("*.part"))
    return killed


def check_listed(tiny: TinyFederation) -> None:
    """At every moment, also right after a crash, what the metadata list is there."""
    manifests = {
        sha256_file(path) for path in tiny.federation.releases.glob("*/targets/*/manifest.json")
    }
    assert listed_manifests(tiny) <= manifests, "the metadata list a release that does not exist"


def test_metadata_signed_before_the_release_is_there_would_be_noticed(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests below: publishing that writes the federation's own metadata first."""
    honest = ddm.publishing.signing.sign_tuf_metadata

    def hasty(version: StagedVersion, *arguments: Any) -> None:
        honest(version, *arguments)
        shutil.copytree(
            version.change.put("tuf/metadata"), version.publisher.tuf, dirs_exist_ok=True
        )

    def crash(change: Change) -> None:
        raise Crash

    monkeypatch.setattr(Change, "commit", crash)
    check_listed(published.tiny)
    for sign in (honest, hasty):
        monkeypatch.setattr(ddm.publishing.signing, "sign_tuf_metadata", sign)
        with pytest.raises(Crash):
            publish_next_version(published.tiny, tmp_path / "out", renew=True)
        if sign is honest:
            check_listed(published.tiny)
    with pytest.raises(AssertionError, match="does not exist"):
        check_listed(published.tiny)


def crash_steps(published: PublishedRelease, folder: Path, stride: int) -> int:
    """Crash at every `stride`-th step until none is left; return at how many."""
    settle(published.tiny, cite="another paper")
    for steps in count():
        there = folder / str(steps)
        if not check_crash(published, there, steps * stride):
            break
        shutil.rmtree(there)
    return steps


def test_publishing_killed_at_some_step_and_run_again_gives_exactly_one_version(
    published: PublishedRelease, tmp_path: Path
) -> None:
    assert crash_steps(published, tmp_path, stride=47) >= 4


@pytest.mark.slow
def test_publishing_killed_at_any_step_and_run_again_gives_exactly_one_version(
    published: PublishedRelease, tmp_path: Path
) -> None:
    assert crash_steps(published, tmp_path, stride=1) >= 150


# Two operators


def test_second_operator_is_told_to_wait(published: PublishedRelease, tmp_path: Path) -> None:
    with published.tiny.federation.signing_lock(), pytest.raises(BusyError):
        publish_next_version(published.tiny, tmp_path / "out", renew=True)
    assert versions(published.tiny) == ["1"]


def test_two_operators_at_once_publish_one_version(
    published: PublishedRelease, tmp_path: Path
) -> None:
    """Two processes; the loser of the race is refused, or comes after and copies the same version out."""
    settle(published.tiny, cite="another paper")
    outs = [tmp_path / "one", tmp_path / "two"]
    ready = os.pipe()
    go = os.pipe()
    pids = [operator(published.tiny, out, ready, go) for out in outs]
    for _ in outs:
        assert os.read(ready[0], 1) == b"r"
    os.write(go[1], b"gg")
    codes = [wait_for_exit(pid) for pid in pids]
    assert sorted(codes) in ([0, 0], [0, BusyError.exit_code])
    assert versions(published.tiny) == ["1", "2"]
    for code, out in zip(codes, outs, strict=True):
        assert out.exists() == (code == 0)
        if code == 0:
            assert verify_release(published, out).manifest.version == 2


def operator(tiny: TinyFederation, out: Path, ready: tuple[int, int], go: tuple[int, int]) -> int:
    def publish_at_once() -> None:
        os.write(ready[1], b"r")
        os.read(go[0], 1)
        try:
            publish_next_version(tiny, out)
        except BusyError as error:
            os._exit(error.exit_code)

    return fork_process(publish_at_once)


# Size


def test_publishing_holds_two_experts_in_memory_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyFederation.create(
        tmp_path / "tiny", {"east": 60, "north": 60, "south": 60, "west": 60}
    )
    real = load_expert
    seen = list[weakref.ref[torch.nn.Module]]()
    most = list[int]()

    def load(*arguments: Any) -> torch.nn.Module:
        expert = real(*arguments)
        seen.append(weakref.ref(expert))
        most.append(sum(reference() is not None for reference in seen))
        return expert

    monkeypatch.setattr(ddm.loading.ensemble, "load_expert", load)
    monkeypatch.setattr(ddm.publishing.pages, "MIN_MEMORY_BYTES", 0)
    monkeypatch.setattr(ddm.publishing.signing, "write_pages", write_pages)
    monkeypatch.setattr(
        ddm.publishing.drawing,
        "EFFORTS",
        (DrawingEffort(own=2, mixed=4, strategies=("lock", "full")),),
    )
    tiny.complete(tmp_path / "release")
    assert len(seen) >= 8, "for the pages, and to see that the release can be loaded"
    assert max(most) == 2


# Quorum, lateness


def test_fewer_silos_than_the_quorum_are_not_published(
    late: PlannedFederation, tmp_path: Path
) -> None:
    tiny, _ = late
    with pytest.raises(PolicyError, check=has_subject("release")) as refused:
        publish_next_version(tiny, tmp_path / "out", quorum=2)
    assert "east" in str(refused.value)
    settle(tiny, quorum=2)
    with pytest.raises(PolicyError, check=has_subject("release")):
        publish_next_version(tiny, tmp_path / "out")
    assert publish_next_version(tiny, tmp_path / "out", quorum=1).manifest.missing_silos == (
        "east",
    )


def test_late_silo_gives_a_next_version_that_retrains_only_the_router(
    late: PlannedFederation, tmp_path: Path
) -> None:
    tiny, plan_id = late
    first = publish_next_version(tiny, tmp_path / "first").manifest
    assert (first.missing_silos, first.version) == (("east",), 1)
    tiny.collect("east", plan_id)
    tiny.take_in()
    with pytest.raises(MissingFileError, check=has_subject("router")):
        publish_next_version(tiny, tmp_path / "second")
    train_router(tiny.federation, take_inventory(tiny.federation), seed=0)
    second = publish_next_version(tiny, tmp_path / "second").manifest
    assert (second.missing_silos, second.version) == ((), 2)
    assert second.supersedes_digest == sha256_hex(first.encode())
    assert second.router.file.digest != first.router.file.digest
    kept = next(expert for expert in second.experts if expert.silo_id == "north")
    assert kept.file == first.experts[0].file
    where = [
        tiny.federation.releases / str(n) / "targets" / plan_id / kept.file.path for n in (1, 2)
    ]
    where.append(tiny.federation.accepted / plan_id / "north" / kept.file.path)
    assert len({path.stat().st_ino for path in where}) == 1
    state = tmp_path / "state"
    for name in ("first", "second"):
        open_release(tmp_path / name, root=tiny.root, state=state)
    with pytest.raises(RollbackError):
        open_release(tmp_path / "first", root=tiny.root, state=state)


# model.sig


def test_published_model_signature_belongs_to_this_version_alone(
    published: PublishedRelease, tmp_path: Path
) -> None:
    """The host swaps in the one of the version before; TUF lists it, and so names it."""
    publish_next_version(published.tiny, tmp_path / "second", renew=True)
    signature = tmp_path / "second" / "targets" / published.plan_id / "model.sig"
    verify_release(published, tmp_path / "second")
    shutil.copyfile(published.release / "targets" / published.plan_id / "model.sig", signature)
    with pytest.raises(DigestError, check=has_subject("model.sig")):
        verify_release(published, tmp_path / "second")


def test_model_signature_over_other_files_is_refused_although_tuf_lists_it(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ddm.publishing.signing.digests_to_sign
    with monkeypatch.context() as patch, pytest.raises(DigestError, check=has_subject("model.sig")):
        patch.setattr(
            ddm.publishing.signing,
            "digests_to_sign",
            lambda manifest: {**honest(manifest), "plan.json": "0" * 64},
        )
        publish_next_version(published.tiny, tmp_path / "lie", renew=True)
    assert versions(published.tiny) == ["1"]
    publish_next_version(published.tiny, tmp_path / "truth", renew=True)
