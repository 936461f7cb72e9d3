"""The router: really trained on the sketches that arrived, judged on public data, tied to its submissions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aggregator.config import Federation
from aggregator.intake.inventory import Inventory, take_inventory
from aggregator.router.statistics import AcceptedStatistics, read_statistics
from aggregator.router.train import load_report, router_path, train_router
from ddm.diffusion.path import LinearPath
from ddm.errors import MissingFileError, SetupError
from ddm.io.tensors import load_tensors, read_header, save_tensors
from ddm.protocol.router_report import RouterReport
from ddm.publishing.router_table import describe_router
from ddm.routers.counts import CountsRouter
from tests.conftest import PublishedRelease
from tests.support.errors import has_subject
from tests.support.federation import TinyFederation, recipe

pytestmark = pytest.mark.usefixtures("short_pages")


def weights(published: PublishedRelease) -> dict[str, torch.Tensor]:
    return load_tensors(
        router_path(published.tiny.federation, published.plan_id), None, max_bytes=1 << 20
    )


def test_learned_router_changes_with_the_sketches_received(
    published: PublishedRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = take_inventory(published.tiny.federation)
    first = train_router(published.tiny.federation, inventory, seed=0)
    before = weights(published)
    again = train_router(published.tiny.federation, inventory, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in weights(published).items())
    assert again == first

    def read_other_sketches(federation: Federation, inventory: Inventory) -> AcceptedStatistics:
        statistics = read_statistics(federation, inventory)
        others = {"north": torch.full_like(statistics.sketches["north"], 0.7)}
        return replace(statistics, sketches={**statistics.sketches, **others})

    monkeypatch.setattr("aggregator.router.train.read_statistics", read_other_sketches)
    other = train_router(published.tiny.federation, inventory, seed=0)
    assert other.sketches != first.sketches
    if first.published == other.published == "learned":
        assert not torch.equal(weights(published)["mass"], before["mass"])


def test_learned_router_starts_from_counts_but_moves_with_the_sketches(
    published_once: PublishedRelease,
) -> None:
    from ddm.routers.refit import refit_shares

    federation = published_once.tiny.federation
    inventory = take_inventory(federation)
    statistics = read_statistics(federation, inventory)
    counts = CountsRouter.from_counts(
        statistics.files.sketch,
        statistics.noisy_KG,
        list(inventory.num_units.values()),
        1.0,
        LinearPath(),
    )
    assert statistics.t_release is not None
    sketches = list(statistics.sketches.values())
    refitted = refit_shares(counts, sketches, statistics.t_release)
    assert float((refitted.log_mass_KG.exp() - counts.log_mass_KG.exp()).abs().max()) > 1e-6


def test_report_publishes_learned_only_where_it_is_nowhere_worse(
    published_once: PublishedRelease,
) -> None:
    federation = published_once.tiny.federation
    report = load_report(federation, take_inventory(federation))
    assert report.sketches is not None
    compared = [*report.bands, report.sketches]
    worse = [band for band in compared if band.difference > 1e-9 and band.difference_low > 0.0]
    assert (report.published == "learned") <= (not worse)
    assert all(
        band.difference == pytest.approx(band.candidate - band.counts, abs=1e-9)
        for band in compared
    )
    assert report.published in describe_router(report)


def test_router_of_other_submissions_is_not_published(
    published: PublishedRelease, tmp_path: Path
) -> None:
    federation = published.tiny.federation
    path = router_path(federation, published.plan_id).with_name("report.json")
    report = RouterReport.parse(path.read_bytes(), subject="report")
    stale = report.model_copy(update={"submissions": report.submissions | {"north": "0" * 64}})
    path.write_bytes(stale.encode())
    with pytest.raises(MissingFileError, check=has_subject("router")):
        published.tiny.publish_only(tmp_path / "out")


def test_router_before_any_submission_says_what_to_do(tmp_path: Path) -> None:
    tiny = TinyFederation.create(tmp_path / "tiny", {"north": 20})
    tiny.sign(recipe())
    with pytest.raises(SetupError, check=has_subject("plan tiny-")) as refused:
        take_inventory(tiny.federation)
    assert "aggregator run" in refused.value.remedy


@pytest.mark.parametrize("other", [b"junk" * 50, None], ids=["junk", "another router"])
def test_router_file_that_its_report_does_not_describe_is_not_published(
    published: PublishedRelease, tmp_path: Path, other: bytes | None
) -> None:
    tiny = published.tiny
    path = router_path(tiny.federation, published.plan_id)
    if other is None:
        described = path.read_bytes()
        first = read_header(path, max_bytes=1 << 20)
        save_tensors(path, {name: torch.full(spec.shape, 0.25) for name, spec in first.items()})
        assert path.read_bytes() != described
    else:
        path.write_bytes(other)
    with pytest.raises(MissingFileError, check=has_subject("router")):
        tiny.publish_only(tmp_path / "next")
    assert not (tmp_path / "next").exists()
