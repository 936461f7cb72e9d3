"""What was accepted is read back as it was signed, or not at all."""

import shutil
from pathlib import Path

import pytest

from aggregator.intake.inventory import take_inventory
from aggregator.router.statistics import read_statistics
from ddm.errors import DigestError, SignatureError
from ddm.protocol.base import now_utc
from ddm.trust.keys import SigningKey
from ddm.trust.silo_role import sign_silo_metadata, verify_silo_metadata
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject

pytestmark = pytest.mark.usefixtures("short_pages")


def accepted(published: PublishedRelease, name: str) -> Path:
    return published.tiny.federation.accepted / published.plan_id / "north" / name


def flip(path: Path, offset: int) -> None:
    """Change one byte of the file and of no other that shares its place on disk."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["counts", "sketch"])
def test_release_is_refused_when_it_changed_after_intake(
    published: PublishedRelease, name: str
) -> None:
    flip(accepted(published, f"{name}.safetensors"), -3)
    federation = published.tiny.federation
    inventory = take_inventory(federation)
    with pytest.raises(DigestError):
        read_statistics(federation, inventory)


def test_document_is_refused_when_it_changed_after_intake(published: PublishedRelease) -> None:
    document = accepted(published, "silos/north/submission.json")
    document.write_bytes(document.read_bytes().replace(b'"policy"', b'"person"'))
    with pytest.raises(DigestError):
        take_inventory(published.tiny.federation)


def test_role_is_refused_when_somebody_else_signed_it(published: PublishedRelease) -> None:
    role = accepted(published, f"metadata/{published.plan_id}.north.json")
    key = published.tiny.key("north").public
    root_digest = published.tiny.federation.root_digest
    signed = verify_silo_metadata(
        role.read_bytes(),
        root_digest=root_digest,
        plan_id=published.plan_id,
        silo_id="north",
        key=key,
        now=now_utc(),
    )
    stranger = SigningKey.generate()
    role.write_bytes(
        sign_silo_metadata(
            published.plan_id,
            "north",
            signed,
            stranger,
            root_digest=root_digest,
            version=1,
            now=now_utc(),
        )
    )
    with pytest.raises(SignatureError):
        take_inventory(published.tiny.federation)


def test_nothing_is_published_when_an_expert_changed_after_intake(
    published: PublishedRelease, tmp_path: Path
) -> None:
    expert = accepted(published, "silos/north/experts/north/expert.safetensors")
    shutil.copyfile(expert, tmp_path / "as signed")
    flip(expert, -3)
    before = {path.name for path in published.tiny.federation.releases.iterdir()}
    with pytest.raises(DigestError, check=has_subject("expert.safetensors")):
        published.tiny.publish_only(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert {
        path.name for path in published.tiny.federation.releases.iterdir() if path.name.isdigit()
    } == before
    shutil.copyfile(tmp_path / "as signed", expert)
    published.tiny.publish_only(tmp_path / "out")
