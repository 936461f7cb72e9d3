"""A real published release: what one flipped byte does, what python-tuf's own client says, how an ensemble behaves."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tuf.api.exceptions import RepositoryError
from tuf.ngclient import Updater, UpdaterConfig
from tuf.ngclient.fetcher import FetcherInterface

import ddm.loading.release
import ddm.publishing.signing
from aggregator.membership.withdrawal import withdraw_silo
from ddm import open_ensemble
from ddm.errors import (
    ArchipelagoError,
    DigestError,
    DocumentError,
    RollbackError,
    TrustError,
    UnlistedFileError,
)
from ddm.loading.ensemble import load_ensemble
from ddm.loading.release import open_release
from ddm.protocol.manifest import Manifest
from ddm.publishing.keys import load_key
from ddm.trust.verify import VerifiedRelease, verify_release
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE
from tests.support.publishing import (
    publish_changed_manifest,
    publish_short_pages,
    publish_unchecked,
)
from tests.support.waiting import LIMIT_S


def release_files(published: PublishedRelease) -> list[str]:
    return sorted(
        p.relative_to(published.release).as_posix()
        for p in published.release.rglob("*")
        if p.is_file()
    )


def test_release_is_complete_and_verifies(published_once: PublishedRelease) -> None:
    release = open_release(published_once.release, root=published_once.root, state=None)
    names = set(release_files(published_once))
    prefix = f"targets/{published_once.plan_id}/"
    assert {prefix + name for name in release.verified.files} == {
        n for n in names if n.startswith("targets/")
    }
    assert set(release.submissions) == set(published_once.tiny.sites)
    assert sum(expert.prior for expert in release.manifest.experts) == pytest.approx(1.0)


@pytest.mark.parametrize("where", [0.0, 0.31, 0.5, 0.77, 1.0])
def test_release_is_refused_when_any_file_has_a_flipped_byte(
    published: PublishedRelease, where: float
) -> None:
    for name in release_files(published):
        path = published.release / name
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[min(int(where * len(data)), len(data) - 1)] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ArchipelagoError) as refused:
            open_release(published.release, root=published.root, state=None)
        named = refused.value.subject.removeprefix(f"targets/{published.plan_id}/")
        assert name.endswith(named), f"{name} was changed, the error names {refused.value.subject}"
        path.write_bytes(data)
    open_release(published.release, root=published.root, state=None)


def test_release_is_refused_with_a_file_too_many(published: PublishedRelease) -> None:
    (published.release / "targets" / published.plan_id / "notes.txt").write_text("hello")
    with pytest.raises(UnlistedFileError):
        open_release(published.release, root=published.root, state=None)


def test_older_version_is_refused_after_a_newer_one_was_seen(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    tiny.publish(tmp_path / "second")
    newer = open_release(tmp_path / "second", root=published.root, state=tmp_path / "state")
    assert newer.manifest.version == 2
    assert newer.manifest.supersedes_digest is not None
    with pytest.raises(RollbackError):
        open_release(published.release, root=published.root, state=tmp_path / "state")
    open_release(tmp_path / "second", root=published.root, state=tmp_path / "state")


class FolderFetcher(FetcherInterface):
    """Serves a release folder to python-tuf's own client, without any code of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _fetch(self, url: str):  # type: ignore[no-untyped-def]
        from tuf.api.exceptions import DownloadHTTPError

        path = self.folder / url.removeprefix("https://release/")
        if not path.is_file():
            raise DownloadHTTPError("not found", 404)
        yield path.read_bytes()


def test_python_tufs_own_client_finds_and_verifies_every_published_file(
    published: PublishedRelease, tmp_path: Path
) -> None:
    (tmp_path / "metadata").mkdir()
    updater = client(published.release, published.root, tmp_path)
    names = [
        name.removeprefix("targets/")
        for name in release_files(published)
        if name.startswith("targets/")
    ]
    for index, name in enumerate(names):
        info = updater.get_targetinfo(name)
        assert info is not None, name
        updater.download_target(info, str(tmp_path / str(index)))
        assert (tmp_path / str(index)).read_bytes() == (
            published.release / "targets" / name
        ).read_bytes()
    assert len(names) >= 10


def test_python_tufs_own_client_refuses_a_withdrawn_silo_that_it_knew_and_whose_host_puts_everything_back(
    published: PublishedRelease, tmp_path: Path
) -> None:
    tiny = published.tiny
    first = published.release
    second = tmp_path / "second"
    (tmp_path / "metadata").mkdir()
    name = f"{published.plan_id}/silos/north/submission.json"
    assert client(first, published.root, tmp_path).get_targetinfo(name) is not None
    withdraw_silo(
        tiny.federation, "north", "asked to", load_key(tiny.federation, "receipts", PASSPHRASE)
    )
    tiny.publish(second)
    kept = f"{published.plan_id}/silos/east/submission.json"
    for path in [
        path for path in first.rglob("*") if path.is_file() and "north" in path.as_posix()
    ]:
        target = second / path.relative_to(first)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    with pytest.raises(RepositoryError):
        client(second, published.root, tmp_path).get_targetinfo(name)
    assert client(second, published.root, tmp_path).get_targetinfo(kept) is not None


def test_public_model_signing_package_accepts_the_release_and_refuses_one_changed_byte(
    published: PublishedRelease,
) -> None:
    folder = published.release / "targets" / published.plan_id
    public = published.tiny.federation.path / "model-signing.pub.pem"
    command = [sys.executable, "-W", "ignore", "-m", "model_signing", "verify", "key", str(folder)]
    command += ["--signature", str(folder / "model.sig"), "--public_key", str(public)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    report = folder / "report.html"
    report.write_bytes(report.read_bytes().replace(b"<", b">", 1))
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode != 0
    # Which quotes surround the name depends on the digest.
    assert re.search(r"Hash mismatch for \\?'report\.html", result.stdout + result.stderr)


def client(release: Path, root: Path, folder: Path) -> Updater:
    """python-tuf's own client, with what it remembers in `folder`."""
    return Updater(
        metadata_dir=str(folder / "metadata"),
        metadata_base_url="https://release/metadata/",
        target_dir=str(folder),
        target_base_url="https://release/targets/",
        fetcher=FolderFetcher(release),
        config=UpdaterConfig(prefix_targets_with_hash=False),
        bootstrap=root.read_bytes(),
    )


def test_ensemble_opens_samples_and_repeats_itself(published_once: PublishedRelease) -> None:
    ensemble = open_ensemble(published_once.release, root=published_once.root)
    few = ensemble.sample(3, strategy="sample", steps=4, seed=5)
    many = ensemble.sample(70, strategy="sample", steps=4, seed=5)
    again = ensemble.sample(3, strategy="sample", steps=4, seed=5)
    assert torch.equal(few.images, again.images)
    torch.testing.assert_close(few.images, many.images[:3], atol=1e-5, rtol=0.0)
    assert not torch.equal(
        few.images, ensemble.sample(3, strategy="sample", steps=4, seed=6).images
    )


def test_ensemble_gives_a_withdrawn_silo_no_sample(published_once: PublishedRelease) -> None:
    ensemble = open_ensemble(published_once.release, root=published_once.root)
    drawn = ensemble.sample(64, strategy="lock", steps=2, prior=[0.0, 1.0])
    assert set(np.unique(drawn.expert_N)) == {1}


def test_expert_swapped_between_silos_is_refused(published: PublishedRelease) -> None:
    experts = published.release / "targets" / published.plan_id / "silos"
    one, two = (
        experts / silo / "experts" / silo / "expert.safetensors"
        for silo in sorted(published.tiny.sites)
    )
    shutil.copyfile(one, two)
    with pytest.raises(DigestError):
        open_release(published.release, root=published.root, state=None)


@pytest.mark.parametrize("name", ["expert.safetensors", "router.safetensors", "sketch.safetensors"])
def test_ensemble_is_refused_when_its_host_swaps_a_tensor_file_after_it_was_verified(
    published: PublishedRelease, name: str
) -> None:
    release = open_release(published.release, root=published.root, state=None)
    load_ensemble(release)
    path = next(published.release.rglob(name))
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError):
        load_ensemble(release)


@pytest.mark.parametrize("name", ["plan.json", "manifest.json", "submission.json"])
def test_release_is_refused_when_its_host_swaps_a_document_after_it_was_verified(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def verify_then_swap(
        *arguments: object, before_recording: Any, **named: object
    ) -> VerifiedRelease:
        def swap_then_read(verified: VerifiedRelease) -> None:
            path = next((published.release / "targets").rglob(name))
            path.write_bytes(path.read_bytes().replace(b'"format"', b' "format"'))
            before_recording(verified)

        return verify_release(*arguments, before_recording=swap_then_read, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ddm.loading.release, "verify_release", verify_then_swap)
    with pytest.raises(DigestError, check=has_subject(name)):
        open_release(published.release, root=published.root, state=None)


def edited(manifest: Manifest, part: str, **changes: object) -> Manifest:
    """The manifest with some fields of its first silo, of its first expert, of its router or of its own changed."""
    if part == "manifest":
        return manifest.model_copy(update=changes)
    if part == "router":
        return manifest.model_copy(update={"router": manifest.router.model_copy(update=changes)})
    first, *others = getattr(manifest, part)
    return manifest.model_copy(update={part: (first.model_copy(update=changes), *others)})


def unequal(manifest: Manifest) -> Manifest:
    """The two priors exchanged: the true ones are 1/3 and 2/3."""
    one, two = manifest.experts
    swapped = (
        one.model_copy(update={"prior": two.prior}),
        two.model_copy(update={"prior": one.prior}),
    )
    return manifest.model_copy(update={"experts": swapped})


LIES: dict[str, Callable[[Manifest], Manifest]] = {
    "licence": lambda manifest: edited(manifest, "manifest", licence="CC0-1.0"),
    "epsilon": lambda manifest: edited(manifest, "silos", epsilon=0.01),
    "delta": lambda manifest: edited(manifest, "silos", delta=1e-9),
    "audit": lambda manifest: edited(manifest, "silos", audit="pass"),
    "isolation": lambda manifest: edited(manifest, "silos", isolation="containers"),
    "key_fingerprint": lambda manifest: edited(manifest, "silos", key_fingerprint="0" * 64),
    "experts": lambda manifest: edited(manifest, "experts", cluster=3),
    "prior": unequal,
    "silos": lambda manifest: edited(manifest, "manifest", missing_silos=("west",)),
    "each silo of the plan": lambda manifest: edited(
        manifest, "manifest", withdrawn_silos=("north",)
    ),
}


def publish_as_a_liar(
    published: PublishedRelease,
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[Manifest], Manifest],
    out: Path,
) -> None:
    """Publish, properly signed, a manifest that says something else, and skip the aggregator's own verification."""
    publish_changed_manifest(monkeypatch, lie)
    publish_short_pages(monkeypatch)
    publish_unchecked(monkeypatch)
    published.tiny.publish_only(out)


@pytest.mark.parametrize("lie", LIES)
def test_release_is_refused_when_its_manifest_contradicts_what_a_silo_signed(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lie: str
) -> None:
    publish_as_a_liar(published, monkeypatch, LIES[lie], tmp_path / "lie")
    with pytest.raises(TrustError) as refused:
        open_release(tmp_path / "lie", root=published.root, state=None)
    assert lie in str(refused.value)


def test_release_is_accepted_when_the_liar_says_the_truth(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control: the refusals above are due to what the manifest says."""
    publish_as_a_liar(published, monkeypatch, lambda manifest: manifest, tmp_path / "truth")
    open_release(tmp_path / "truth", root=published.root, state=None)


def test_aggregator_publishes_nothing_that_a_researcher_would_refuse(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish_changed_manifest(monkeypatch, LIES["epsilon"])
    with pytest.raises(TrustError, check=has_subject("manifest.json, silo east, epsilon")):
        published.tiny.publish_only(tmp_path / "lie")
    assert not (tmp_path / "lie").exists()


@pytest.mark.parametrize("changes", [{"temperature": 500.0}, {"training_prior": (1.0, 0.0)}])
def test_ensemble_is_refused_when_its_router_says_what_cannot_be_applied(
    published: PublishedRelease,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changes: dict[str, object],
) -> None:
    publish_as_a_liar(
        published,
        monkeypatch,
        lambda manifest: edited(manifest, "router", **changes),
        tmp_path / "other",
    )
    release = open_release(tmp_path / "other", root=published.root, state=None)
    with pytest.raises(DocumentError, check=has_subject(next(iter(changes)).replace("_", " "))):
        load_ensemble(release)


@pytest.mark.parametrize("twice", ["silos", "experts"])
def test_manifest_is_refused_when_a_silo_or_an_expert_appears_twice(
    published_once: PublishedRelease, twice: str
) -> None:
    release = open_release(published_once.release, root=published_once.root, state=None)
    manifest = release.manifest
    first, second = getattr(manifest, twice)
    doubled = (first, second.model_copy(update={"silo_id": first.silo_id}))
    if twice == "experts":
        doubled = (first, second.model_copy(update={"expert_id": first.expert_id}))
    spoilt = manifest.model_copy(update={twice: doubled})
    with pytest.raises(DocumentError, check=has_subject("manifest.json, field document")):
        Manifest.parse(spoilt.encode(), subject="manifest.json")


def test_release_without_a_silo_that_never_answered_verifies(tmp_path: Path) -> None:
    from tests.support.federation import TinyFederation

    tiny = TinyFederation.create(tmp_path, {"east": 20, "north": 20})
    plan_id = tiny.sign()
    tiny.deliver_plan("north", plan_id)
    tiny.work("north")
    tiny.collect("north", plan_id)
    tiny.take_in()
    tiny.publish(tmp_path / "release")
    release = open_release(tmp_path / "release", root=tiny.root, state=None)
    assert (release.manifest.missing_silos, set(release.submissions)) == (("east",), {"north"})
