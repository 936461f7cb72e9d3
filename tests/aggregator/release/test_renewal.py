"""What `publish --renew` costs: a later timestamp, and no byte of an expert written again inside the federation."""

from datetime import timedelta
from pathlib import Path

import pytest

import ddm.publishing.staging
from ddm.protocol.base import now_utc
from ddm.publishing.versions import timestamp_expiry
from tests.conftest import PublishedRelease
from tests.support.publishing import publish_next_version, verify_release

LATER = timedelta(days=60)

pytestmark = pytest.mark.usefixtures("short_pages")


def test_renewal_lasts_longer_and_shares_every_expert_and_the_router_with_the_version_before(
    published: PublishedRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = published.tiny.federation
    assert (
        publish_next_version(published.tiny, tmp_path / "before", renew=True).manifest.version == 2
    )
    monkeypatch.setattr(ddm.publishing.staging, "now_utc", lambda: now_utc() + LATER)
    assert (
        publish_next_version(published.tiny, tmp_path / "renewed", renew=True).manifest.version == 3
    )
    assert timestamp_expiry(federation, 3) - timestamp_expiry(federation, 2) >= LATER
    first, second = (
        federation.releases / str(version) / "targets" / published.plan_id for version in (2, 3)
    )
    names = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    same = {name.as_posix() for name in names if (first / name).samefile(second / name)}
    made = {
        "manifest.json",
        "manifest.tlog-proof",
        "log-consistency.json",
        "model.sig",
        "README.md",
        "report.html",
    }
    assert {name.as_posix() for name in names} - same == made
    assert verify_release(published, tmp_path / "renewed", tmp_path / "state").manifest.version == 3
