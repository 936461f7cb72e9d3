"""A release is opened with one reading of each expert: what is not compared at verification is compared at loading."""

import os
from pathlib import Path

import pytest

from ddm.errors import DigestError
from ddm.loading.ensemble import load_ensemble, open_ensemble
from ddm.loading.release import open_release
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject


def expert_of(published: PublishedRelease) -> Path:
    return next(published.release.glob("targets/*/silos/*/experts/*/expert.safetensors"))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_expert_of_other_bytes_is_refused_whether_it_is_read_now_or_later(
    published: PublishedRelease,
) -> None:
    assert open_ensemble(published.release, root=published.root).expert_ids
    flip_last_byte(expert_of(published))
    with pytest.raises(DigestError, check=has_subject("expert")):
        open_release(published.release, root=published.root, state=None)
    release = open_release(published.release, root=published.root, state=None, experts_later=True)
    assert not all(file.digest_checked for file in release.verified.files.values())
    with pytest.raises(DigestError, check=has_subject("expert")):
        load_ensemble(release)


def test_expert_of_another_length_is_refused_before_it_is_read(published: PublishedRelease) -> None:
    os.truncate(expert_of(published), 100)
    with pytest.raises(DigestError, check=has_subject("expert")):
        open_release(published.release, root=published.root, state=None, experts_later=True)


def test_everything_but_the_experts_is_read_at_once(published: PublishedRelease) -> None:
    release = open_release(published.release, root=published.root, state=None, experts_later=True)
    later = {name for name, file in release.verified.files.items() if not file.digest_checked}
    assert later == {expert.file.path for expert in release.manifest.experts}
    router = next(published.release.glob("targets/*/router.safetensors"))
    flip_last_byte(router)
    with pytest.raises(DigestError, check=has_subject("router")):
        open_release(published.release, root=published.root, state=None, experts_later=True)
