"""A ledger that was put back, deleted or copied draws nothing a second time."""

import json
import shutil
from pathlib import Path

import pytest

from ddm.errors import LedgerError, MissingFileError
from silo.config import Site
from silo.privacy.holder import open_ledger
from silo.setup import set_anchor
from silo.worker.state import load_state, save_state, state_path
from tests.support.errors import has_subject
from tests.support.federation import PlannedFederation, TinyFederation

SILO = "north"
LEDGER = ("ledger.jsonl", "ledger.head", "draws")


@pytest.fixture
def assigned(planned_once: PlannedFederation, tmp_path: Path) -> tuple[TinyFederation, Site, str]:
    """A site that is about to draw, and a copy of its ledger as it is now."""
    once, plan_id = planned_once
    tiny = once.copy(tmp_path / "copy")
    tiny.work(SILO, until="audited")
    return tiny, tiny.sites[SILO], plan_id


def keep(site: Site, folder: Path, names: tuple[str, ...] = LEDGER) -> Path:
    folder.mkdir()
    for name in names:
        source = site.private / name
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / name)
    return folder


def put_back(site: Site, kept: Path) -> None:
    for source in kept.iterdir():
        target = site.private / source.name
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)


def rewind(site: Site, plan_id: str) -> None:
    """Let the worker draw again, as if all of its work since then was put back with the ledger."""
    shutil.rmtree(site.private / "checkpoints" / plan_id / "statistics")
    save_state(
        state_path(site.private),
        load_state(state_path(site.private)).model_copy(update={"state": "audited"}),
    )


def draws(site: Site) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (site.private / "draws").iterdir()}


def test_ledger_put_back_alone_is_refused_because_its_draws_have_no_debit(
    assigned, tmp_path: Path
) -> None:
    tiny, site, plan_id = assigned
    kept = keep(site, tmp_path / "kept", LEDGER[:2])
    tiny.work(SILO, until="released")
    before = draws(site)
    rewind(site, plan_id)
    put_back(site, kept)
    with pytest.raises(LedgerError, check=has_subject("draws")):
        tiny.work(SILO, until="released")
    assert draws(site) == before


def test_ledger_put_back_with_its_draws_is_refused_because_of_the_statistics_that_are_there(
    assigned, tmp_path
) -> None:
    tiny, site, _ = assigned
    kept = keep(site, tmp_path / "kept")
    tiny.work(SILO, until="released")
    save_state(
        state_path(site.private),
        load_state(state_path(site.private)).model_copy(update={"state": "audited"}),
    )
    put_back(site, kept)
    with pytest.raises(LedgerError, check=has_subject("draw of counts")):
        tiny.work(SILO, until="released")
    assert not draws(site)


def test_private_folder_put_back_whole_is_refused_because_of_what_was_sent(
    assigned, tmp_path: Path
) -> None:
    tiny, site, plan_id = assigned
    shutil.copytree(site.private, tmp_path / "private")
    tiny.work(SILO, until="in_outbox")
    shutil.rmtree(site.private)
    shutil.copytree(tmp_path / "private", site.private)
    shutil.copytree(site.outbox / plan_id, tmp_path / "sent")
    with pytest.raises(LedgerError, match="a submission in the outbox"):
        tiny.work(SILO, until="released")
    assert not draws(site)
    shutil.rmtree(site.outbox / plan_id)  # the control: only what was sent shows it here
    tiny.work(SILO, until="released")
    assert draws(site)


def test_ledger_put_back_is_refused_by_its_anchor_before_a_second_draw(
    assigned, tmp_path: Path
) -> None:
    tiny, site, plan_id = assigned
    anchor = tmp_path / "disk" / "north.anchor"
    anchor.parent.mkdir()
    set_anchor(site, anchor)
    shutil.copytree(site.private, tmp_path / "private")
    tiny.work(SILO, until="released")
    head, stated = (
        json.loads(path.read_bytes()) for path in (site.private / "ledger.head", anchor)
    )
    assert (stated["num_entries"], stated["head_digest"]) == (3, head["head_digest"])
    shutil.rmtree(site.private)
    shutil.copytree(tmp_path / "private", site.private)
    with pytest.raises(LedgerError, match=r"extends its anchor north\.anchor: record 3"):
        tiny.work(SILO, until="released")
    assert not draws(site)


@pytest.mark.parametrize("names", [LEDGER, LEDGER[:2], ("ledger.jsonl",), ("draws",)])
def test_deleted_ledger_is_never_made_again_by_the_worker(assigned, names: tuple[str, ...]) -> None:
    tiny, site, plan_id = assigned
    tiny.work(SILO, until="released")
    rewind(site, plan_id)
    for name in names:
        path = site.private / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises((LedgerError, MissingFileError)):
        tiny.work(SILO, until="released")
    assert not any((site.private / name).exists() for name in names)


def test_site_copied_with_its_ledger_draws_in_one_place_only(assigned, tmp_path: Path) -> None:
    tiny, site, _ = assigned
    anchor = tmp_path / "disk" / "north.anchor"
    anchor.parent.mkdir()
    set_anchor(site, anchor)
    twin = tiny.copy(tmp_path / "twin")
    tiny.work(SILO, until="released")
    with pytest.raises(LedgerError, match="copied to a second site|extends its anchor"):
        twin.work(SILO, until="released")
    assert not draws(twin.sites[SILO])
    assert draws(site)


def test_anchor_that_is_gone_or_damaged_stops_the_site(assigned, tmp_path: Path) -> None:
    tiny, site, _ = assigned
    anchor = tmp_path / "disk" / "north.anchor"
    anchor.parent.mkdir()
    set_anchor(site, anchor)
    for spoil in (
        lambda: anchor.write_bytes(b"junk"),
        anchor.unlink,
        lambda: shutil.rmtree(anchor.parent),
    ):
        spoil()
        with pytest.raises(LedgerError, check=has_subject("ledger anchor")):
            tiny.work(SILO, until="released")
    assert not draws(site)


def test_crash_before_the_anchor_is_written_costs_nothing_but_the_debit(
    assigned, tmp_path: Path
) -> None:
    tiny, site, _ = assigned
    anchor = tmp_path / "north.anchor"
    set_anchor(site, anchor)
    before = anchor.read_bytes()
    tiny.work(SILO, until="released")
    anchor.write_bytes(before)
    open_ledger(site, site.policy()).verify()
    assert json.loads(anchor.read_bytes())["num_entries"] == 3


def test_ledger_is_given_no_anchor_of_another_ledger(planned_once, tmp_path: Path) -> None:
    tiny = planned_once.tiny.copy(tmp_path / "copy")
    anchor = tmp_path / "shared.anchor"
    set_anchor(tiny.sites[SILO], anchor)
    tiny.work(SILO, until="released")
    other = planned_once.tiny.copy(tmp_path / "other").sites[SILO]
    with pytest.raises(LedgerError, match="extends its anchor"):
        set_anchor(other, anchor)
    assert other.settings().ledger.anchor is None
