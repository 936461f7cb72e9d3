"""What tests of publishing share: a federation that publishes quickly, a process that is killed at a chosen step."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import ddm.publishing.signing
from aggregator.release.publish import Publication, publish
from ddm.footprint import opening_bytes, sampling_bytes
from ddm.loading.release import Release, open_release
from ddm.protocol.base import sha256_file
from ddm.protocol.manifest import Manifest
from ddm.publishing.contents import ReleaseContents, draft_manifest
from ddm.publishing.keys import load_key
from ddm.publishing.pages import PAGE_NAMES
from ddm.publishing.staging import StagedVersion
from ddm.trust.keys import SigningKey
from tests.conftest import PublishedRelease
from tests.support.federation import PASSPHRASE, TinyFederation
from tests.support.forked import fork_process, wait_for_exit

CHANGES = ("rename", "replace", "link", "unlink", "mkdir", "rmdir", "fsync")


def write_short_pages(
    contents: ReleaseContents, manifest: Manifest, targets: Path, **options: object
) -> None:
    """Write pages of one line: drawing images takes the time, and the pages have tests of their own."""
    for name in PAGE_NAMES:
        (targets / name).write_text(f"version {manifest.version}\n")


def publish_short_pages(patch: pytest.MonkeyPatch) -> None:
    """Let publishing write pages of one line."""
    patch.setattr(ddm.publishing.signing, "write_pages", write_short_pages)


def publish_unchecked(patch: pytest.MonkeyPatch) -> None:
    """Let a dishonest publisher skip opening the release before it is in force."""
    patch.setattr(ddm.publishing.signing, "check_release_opens", lambda *arguments: None)


def publish_changed_manifest(
    patch: pytest.MonkeyPatch, change: Callable[[Manifest], Manifest]
) -> None:
    """Let publishers, a federation or one owner, sign another manifest than the true one."""

    def changed(contents: ReleaseContents, version: StagedVersion) -> Manifest:
        return change(draft_manifest(contents, version))

    patch.setattr("aggregator.release.publish.draft_manifest", changed)
    patch.setattr("ddm.islands.assemble.draft_manifest", changed)


def publish_next_version(tiny: TinyFederation, out: Path, **options: object) -> Publication:
    """Publish where things stand."""
    return publish(tiny.federation, PASSPHRASE, out, rehearsal=True, **options)  # type: ignore[arg-type]


def verify_release(
    published: PublishedRelease, release: Path, state: Path | None = None
) -> Release:
    """Verify a release as a researcher."""
    return open_release(release, root=published.root, state=state)


def file_digests(folder: Path) -> dict[str, str]:
    """Every file below a folder by its digest."""
    return {
        path.relative_to(folder).as_posix(): sha256_file(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def receipts_key(tiny: TinyFederation) -> SigningKey:
    """Open the key that signs receipts."""
    return load_key(tiny.federation, "receipts", PASSPHRASE)


def copy_without_sites(published: PublishedRelease, folder: Path) -> PublishedRelease:
    """The federation alone, without the sites, in a new place."""
    federation = type(published.tiny.federation)(folder / "fed")
    shutil.copytree(published.tiny.federation.path, federation.path)
    return PublishedRelease(
        published.release, published.root, published.plan_id, TinyFederation(folder, federation, {})
    )


def least_memory(release: Release, num: int = 1, batch: int = 1, steps: int = 1) -> int:
    """The least limit within which a release can be sampled, with one expert in memory."""
    sizes = [expert.file.bytes for expert in release.manifest.experts]
    drawing = sampling_bytes(release.plan, len(sizes), num=num, batch=batch, steps=steps)
    return opening_bytes(release.plan, len(sizes)) + drawing + max(sizes)


def kill_at_step(step: int, act: Callable[[], object]) -> bool:
    """Act in a forked process that is killed right before its n-th change on disk; tell whether it got that far."""
    left = step

    def deadly(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*arguments, **named)

        return call

    def act_until_killed() -> None:
        for name in CHANGES:
            setattr(os, name, deadly(getattr(os, name)))
        act()

    code = wait_for_exit(fork_process(act_until_killed))
    assert code in (0, -signal.SIGKILL), "it failed by itself"
    return code != 0
