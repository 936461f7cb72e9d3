"""What leaves with a privately trained expert does not depend on its audit, which the site alone sees."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddm.errors import DocumentError
from ddm.protocol.data import DataSpec
from ddm.protocol.submission import Submission, submission_path
from silo.audit.document import AuditReport, read_report
from silo.audit.holdout import holdout_mask
from silo.config import Site
from silo.plan.workspace import open_workspace
from silo.review.facts import read_review_facts
from silo.review.text import review_text
from silo.worker import auditing
from silo.worker.status import read_status
from silo.worker.worker import Worker
from tests.support.case import case
from tests.support.cohorts import cohort_at
from tests.support.documents import to_bytes
from tests.support.federation import POLICY, PlannedFederation, TinyFederation, recipe, write_policy
from tests.support.parsers import submission_document

SILO = "north"
NUM = 80
HELD = 20
EXPERT = recipe().model_dump(mode="json")["expert"]
EXPERT["training"] |= {"num_steps": 4}
EXPERT["privacy"] = {
    "kind": "dp_sgd",
    "epsilon": 4.0,
    "delta": 1e-6,
    "units_per_step": 8,
    "draws": 1,
}
STATISTICS = {
    "unit": "image",
    "total": {"epsilon": 2.0, "delta": 0.0},
    "counts": {"epsilon": 2.0, "num_groups": 4},
}
STRICT = {
    "required": True,
    "min_holdout_units": HELD,
    "max_near_copy_rate": 0.0,
    "max_mia_auc": 0.5,
    "max_mia_tpr": 0.0,
}
HOLDS = {"required": True, "holdout_share": 0.25, "min_holdout_units": 10, "num_samples": 20}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """A site that holds 20 of 80 images out, and the plan of private experts; nobody waives anything."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("private"), {SILO: NUM})
    plan_id = tiny.sign(
        recipe(expert=EXPERT, audit=STRICT, statistics=STATISTICS, router={"kind": "counts"})
    )
    tiny.deliver_plan(SILO, plan_id)
    write_policy(tiny.sites[SILO], POLICY | {"audit": HOLDS})
    return PlannedFederation(tiny, plan_id)


def with_a_duplicate(tiny: TinyFederation) -> None:
    """Exchange one learned image for a copy of one held out, which then says nothing: too few are left to tell."""
    site = tiny.sites[SILO]
    data = Path(site.settings().data)
    shape = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
    cohort = cohort_at(data, shape, min_images=1, salt=site.salt(), unit="image", num_classes=None)
    holdout_N = holdout_mask(cohort, site.policy())
    assert int(holdout_N.sum()) == HELD
    with np.load(data) as stored:
        arrays = dict(stored)
    learned = int((~holdout_N).nonzero()[0])
    other = int(holdout_N.nonzero()[0])
    arrays["images"][learned] = arrays["images"][other]
    np.savez(data, **arrays)


def leave(
    tiny: TinyFederation, plan_id: str
) -> tuple[dict[str, Any], list[str], dict[str, int], AuditReport]:
    """Send a submission; return its document, the states on the way, the sizes of its files, and the report here."""
    site = tiny.sites[SILO]
    states = []
    worker = Worker(site, tiny.key(SILO), lambda state: states.append(state.state))
    worker.begin()
    while worker.state.state != "in_outbox":
        worker.step()
    status = json.loads((site.outbox / "status.json").read_bytes())
    folder = site.outbox / plan_id / "1"
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    document = json.loads((folder / submission_path(SILO)).read_bytes())
    entered = [
        state for state, before in zip(states, [None, *states], strict=False) if state != before
    ]
    return (
        document,
        [*entered, str(status)],
        sizes,
        read_report(open_workspace(site, plan_id).audit_path),
    )


def drawn_in_private(document: dict[str, Any]) -> bytes:
    """Blank what is drawn at random: the digests of weights, statistics and ledger; and the times."""
    for entry in (*document["experts"], *document["statistics"]):
        entry["file"]["digest"] = ""
    document["ledger"] |= {"head_digest": "", "chain": [""] * len(document["ledger"]["chain"])}
    document["created_at"] = document["approval"]["at"] = ""
    return json.dumps(document).encode()


@pytest.fixture(scope="module")
def left(
    planned: PlannedFederation, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, Site]:
    """What leaves of two sites whose data differ in one image: one is audited, the other has too few units for it."""
    folder = tmp_path_factory.mktemp("neighbours")
    audited = copy_with_its_data(planned[0], folder / "one")
    other = copy_with_its_data(planned[0], folder / "other")
    with_a_duplicate(other)
    return leave(audited, planned[1]), leave(other, planned[1]), audited.sites[SILO]


def copy_with_its_data(original: TinyFederation, folder: Path) -> TinyFederation:
    """Copy a federation whose sites then read the copies of their data."""
    tiny = original.copy(folder)
    for site in tiny.sites.values():
        old_path = str(site.settings().data)
        settings_path = site.path / "silo.toml"
        text = settings_path.read_text()
        settings_path.write_text(text.replace(old_path, str(tiny.path / f"{SILO}.npz")))
    return tiny


def test_audits_of_two_neighbours_end_differently(left: tuple[Any, Any, Site]) -> None:
    one = left[0][3]
    other = left[1][3]
    # What attacks find on so few images is chance, and so is the first verdict; that they were tried is not.
    assert "the plan needs" in other.reason and other.verdict == "inconclusive"
    assert "the plan needs" not in one.reason


def test_all_that_leaves_of_two_neighbours_is_the_same_but_for_what_is_drawn(
    left: tuple[Any, Any, Site],
) -> None:
    one = left[0]
    other = left[1]
    assert one[0]["audit"] == {"verdict": "bounded", "digest": None, "waiver": None}
    assert drawn_in_private(one[0]) == drawn_in_private(other[0])
    assert one[1:3] == other[1:3], "states, what the courier tells, names and sizes of files"


def test_person_at_the_site_sees_what_the_audit_found(
    planned: PlannedFederation, tmp_path: Path
) -> None:
    tiny = planned[0].copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    write_policy(site, POLICY | {"audit": HOLDS, "approval": {"kind": "person"}})
    tiny.work(SILO, until="awaiting_approval")
    facts = read_review_facts(site)
    report = read_report(open_workspace(site, planned[1]).audit_path)
    assert facts.audit == report and report.experts
    said = review_text(site, facts)
    assert f"measured here   {report.verdict}: {report.reason}" in said and "bounded" in said
    assert report.experts[0].auc[0].name.encode() not in facts.draft.encode()
    status = read_status(site)
    assert status.as_json()["audit"] == {"verdict": report.verdict, "reason": report.reason}
    assert f"leak audit: {report.verdict}" in status.text()


def test_audit_that_breaks_off_stops_nothing_that_others_see(
    planned: PlannedFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ValueError("a row that is not finite")

    monkeypatch.setattr(auditing, "audit_expert", breaks)
    tiny = planned[0].copy(tmp_path / "copy")
    tiny.work(SILO)
    report = read_report(open_workspace(tiny.sites[SILO], planned[1]).audit_path)
    assert report.verdict == "inconclusive" and "a row that is not finite" in report.reason


def test_reader_refuses_a_verdict_that_says_more_than_epsilon_and_bounded_without_one() -> None:
    plain = submission_document()
    private = plain | {"audit": {"verdict": "bounded", "waiver": None}}
    stated = {
        "kind": "dp_sgd",
        "epsilon": 4.0,
        "delta": 1e-6,
        "unit": "image",
        "relation": "replace_one",
        "noise_multiplier": 1.0,
        "rate": 0.1,
    }
    private["experts"] = [expert | {"privacy": stated} for expert in plain["experts"]]
    assert Submission.parse(to_bytes(private), subject="submission.json").audit.digest is None
    refused = {
        "pass of a private expert": private
        | {"audit": {"verdict": "pass", "digest": "a" * 64, "waiver": None}},
        "a digest beside bounded": private
        | {"audit": {"verdict": "bounded", "digest": "a" * 64, "waiver": None}},
        "bounded without epsilon": plain | {"audit": {"verdict": "bounded", "waiver": None}},
        "pass without a digest": plain | {"audit": {"verdict": "pass", "waiver": None}},
    }
    for name, document in refused.items():
        with case(name), pytest.raises(DocumentError, match=r"audit|verdict"):
            Submission.parse(to_bytes(document), subject="submission.json")
