"""Sites over the same images share one ledger, and cannot spend its budget twice."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from ddm.errors import BudgetError, LedgerError
from ddm.protocol.base import sha256_hex
from silo.config import LedgerSettings, Site
from silo.privacy.holder import note_site, open_ledger
from tests.support.federation import POLICY, TinyFederation, cohort, recipe, write_policy

FIRST = "north"
SECOND = "hospital"
COSTS = {
    "unit": "image",
    "total": {"epsilon": 6.0, "delta": 1e-5},
    "counts": {"epsilon": 6.0, "num_groups": 4},
}


@pytest.fixture(scope="module")
def two_federations(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TinyFederation, TinyFederation]:
    """Two federations with a site each over the same images, and one ledger."""
    folder = tmp_path_factory.mktemp("holder")
    data = folder / "images.npz"
    ledger = LedgerSettings(folder=str(folder / "ledger"))
    np.savez(data, **cohort(40, 0.0, seed=1))  # type: ignore[arg-type]
    made = []
    for number, silo_id in enumerate((FIRST, SECOND)):
        tiny = TinyFederation.create(folder / str(number), {"other": 30})
        tiny.join_with(silo_id, data, ledger=ledger)
        tiny.deliver_plan(silo_id, tiny.sign(recipe(statistics=COSTS, router={"kind": "counts"})))
        made.append(tiny)
    return made[0], made[1]


@pytest.fixture
def pair(two_federations, tmp_path: Path) -> tuple[TinyFederation, TinyFederation]:
    """A copy of both with a ledger of its own."""
    shutil.copytree(two_federations[0].path.parent / "ledger", tmp_path / "ledger")
    copies = [tiny.copy(tmp_path / tiny.path.name) for tiny in two_federations]
    for tiny, silo_id in zip(copies, (FIRST, SECOND), strict=True):
        settings = tiny.sites[silo_id].path / "silo.toml"
        old = tiny.sites[silo_id].settings().ledger.folder
        settings.write_text(settings.read_text().replace(str(old), str(tmp_path / "ledger")))
    return copies[0], copies[1]


def test_two_sites_over_the_same_images_cannot_spend_the_budget_twice(pair) -> None:
    first, second = pair
    first.work(FIRST, until="released")
    with pytest.raises(BudgetError, match="at most 10"):
        second.work(SECOND, until="released")
    for tiny, silo_id in ((first, FIRST), (second, SECOND)):
        site = tiny.sites[silo_id]
        assert open_ledger(site, site.policy()).spent() == (6.0, 1e-5)


def test_ledger_names_the_same_images_alike_at_every_site(pair) -> None:
    states = [
        tiny.work(silo_id, until="scanned")
        for tiny, silo_id in zip(pair, (FIRST, SECOND), strict=True)
    ]
    assert states[0].dataset_digest == states[1].dataset_digest
    own = [tiny.sites[silo].private for tiny, silo in zip(pair, (FIRST, SECOND), strict=True)]
    assert not any((private / "dataset.salt").exists() for private in own)


def test_strictest_policy_of_all_sites_is_the_budget(pair) -> None:
    first, second = pair
    sites = first.sites[FIRST], second.sites[SECOND]
    for site, budget in zip(sites, (5.0, 100.0), strict=True):
        write_policy(site, POLICY | {"privacy": {"unit": "image", "budget_epsilon": budget}})
        note_site(site, site.policy())
    assert [open_ledger(site, site.policy()).budget.epsilon for site in sites] == [5.0, 5.0]
    with pytest.raises(BudgetError, match="at most 5"):
        second.work(SECOND, until="released")
    write_policy(sites[0], POLICY | {"privacy": {"unit": "patient", "budget_epsilon": 100.0}})
    note_site(sites[0], sites[0].policy())
    assert open_ledger(sites[1], sites[1].policy()).unit == "patient"


def test_site_that_joins_a_ledger_finds_what_was_spent(pair, tmp_path: Path) -> None:
    first, _ = pair
    first.work(FIRST, until="released")
    first.join_with(
        "late",
        Path(first.sites[FIRST].settings().data),
        ledger=LedgerSettings(folder=str(tmp_path / "ledger")),
    )
    late = first.sites["late"]
    assert open_ledger(late, late.policy()).spent()[0] == 6.0
    assert sha256_hex(late.salt()) == sha256_hex(first.sites[FIRST].salt())


def test_site_does_not_join_a_ledger_without_its_salt(pair, tmp_path: Path) -> None:
    first, _ = pair
    (tmp_path / "ledger" / "dataset.salt").unlink()
    with pytest.raises(LedgerError, match=r"no dataset\.salt"):
        first.join_with(
            "late",
            Path(first.sites[FIRST].settings().data),
            ledger=LedgerSettings(folder=str(tmp_path / "ledger")),
        )
    assert not (Site(first.path / "late").path / "silo.toml").exists()
