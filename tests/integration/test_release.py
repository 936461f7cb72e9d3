"""A real published release: what one flipped byte does, what python-tuf's own client says, how an ensemble behaves."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tuf.ngclient import Updater, UpdaterConfig
from tuf.ngclient.fetcher import FetcherInterface

from ddm import Ensemble
from ddm.artifact import open_release
from ddm.errors import ArchipelagoError, DigestError, RollbackError, UnlistedFileError
from tests.conftest import Published


def release_files(published: Published) -> list[str]:
    return sorted(p.relative_to(published.release).as_posix() for p in published.release.rglob("*") if p.is_file())


def test_release_is_complete_and_verifies(published_once: Published) -> None:
    release = open_release(published_once.release, root=published_once.root, state=None)
    names = set(release_files(published_once))
    prefix = f"targets/{published_once.plan_id}/"
    assert {prefix + name for name in release.verified.files} == {n for n in names if n.startswith("targets/")}
    assert set(release.submissions) == set(published_once.tiny.sites)
    assert sum(expert.prior for expert in release.manifest.experts) == pytest.approx(1.0)


@pytest.mark.parametrize("where", [0.0, 0.31, 0.5, 0.77, 1.0])
def test_release_is_refused_when_any_file_has_a_flipped_byte(published: Published, where: float) -> None:
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


def test_release_is_refused_with_a_file_too_many(published: Published) -> None:
    (published.release / "targets" / published.plan_id / "notes.txt").write_text("hello")
    with pytest.raises(UnlistedFileError):
        open_release(published.release, root=published.root, state=None)


def test_older_version_is_refused_after_a_newer_one_was_seen(published: Published, tmp_path: Path) -> None:
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


def test_python_tufs_own_client_finds_and_verifies_every_published_file(published: Published, tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    updater = Updater(
        metadata_dir=str(tmp_path / "metadata"),
        metadata_base_url="https://release/metadata/",
        target_dir=str(tmp_path),
        target_base_url="https://release/targets/",
        fetcher=FolderFetcher(published.release),
        config=UpdaterConfig(prefix_targets_with_hash=False),
        bootstrap=published.root.read_bytes(),
    )
    names = [name.removeprefix("targets/") for name in release_files(published) if name.startswith("targets/")]
    for index, name in enumerate(names):
        info = updater.get_targetinfo(name)
        assert info is not None, name
        updater.download_target(info, str(tmp_path / str(index)))
        assert (tmp_path / str(index)).read_bytes() == (published.release / "targets" / name).read_bytes()
    assert len(names) >= 10


def test_ensemble_opens_samples_and_repeats_itself(published_once: Published) -> None:
    ensemble = Ensemble.open(published_once.release, root=published_once.root)
    few = ensemble.sample(3, strategy="sample", steps=4, seed=5)
    many = ensemble.sample(70, strategy="sample", steps=4, seed=5)
    again = ensemble.sample(3, strategy="sample", steps=4, seed=5)
    assert torch.equal(few.images, again.images)
    assert torch.equal(few.images, many.images[:3])
    assert not torch.equal(few.images, ensemble.sample(3, strategy="sample", steps=4, seed=6).images)


def test_ensemble_gives_a_withdrawn_silo_no_sample(published_once: Published) -> None:
    ensemble = Ensemble.open(published_once.release, root=published_once.root)
    drawn = ensemble.sample(64, strategy="lock", steps=2, prior=[0.0, 1.0])
    assert set(np.unique(drawn.expert_N)) == {1}


def test_expert_swapped_between_silos_is_refused(published: Published) -> None:
    experts = published.release / "targets" / published.plan_id / "silos"
    one, two = (experts / silo / "experts" / silo / "expert.safetensors" for silo in sorted(published.tiny.sites))
    shutil.copyfile(one, two)
    with pytest.raises(DigestError):
        open_release(published.release, root=published.root, state=None)
