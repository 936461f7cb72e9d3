"""The audit at a silo: who is held out, what it writes, what it shows, and what never leaves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ddm.errors import AuditError
from ddm.io.tensors import save_tensors
from ddm.models import build_expert
from ddm.pages.render import render
from ddm.protocol.architecture import Dit
from ddm.protocol.base import sha256_hex
from ddm.protocol.data import DataSpec
from ddm.protocol.submission import Submission, expert_path, submission_path
from silo.audit.document import AuditReport
from silo.audit.holdout import holdout_mask, num_holdout_units
from silo.audit.worst import read_worst
from silo.config import Policy
from silo.data.cohort import Cohort
from silo.plan.workspace import open_workspace
from silo.review.facts import read_review_facts as gather_facts
from silo.review.leaks import expert_leaks
from silo.review.text import review_text
from silo.worker.auditing import audit_experts, gather_audit_inputs
from silo.worker.worker import Worker
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject
from tests.support.federation import (
    POLICY,
    PlannedFederation,
    TinyFederation,
    cohort,
    recipe,
    waive,
    write_policy,
)

SILO = "north"
MOST = {"max_near_copy_rate": 1.0, "max_mia_auc": 1.0, "max_mia_tpr": 1.0}
LOOSE = {"required": True, "min_holdout_units": 10} | MOST
HOLDS = {"holdout_share": 0.25, "min_holdout_units": 10, "num_samples": 40} | MOST


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> PlannedFederation:
    """A site that holds 20 of 80 images out; its experts have been audited."""
    tiny = TinyFederation.create(tmp_path_factory.mktemp("audit"), {SILO: 80})
    plan_id = tiny.sign(recipe(audit=LOOSE))
    tiny.deliver_plan(SILO, plan_id)
    write_policy(
        tiny.sites[SILO],
        POLICY | {"audit": {"required": True, **HOLDS}, "approval": {"kind": "person"}},
    )
    bundle = tiny.federation.bundle(plan_id)
    waive(tiny.sites[SILO], sha256_hex((bundle / "targets" / plan_id / "plan.json").read_bytes()))
    tiny.work(SILO, until="audited")
    return PlannedFederation(tiny, plan_id)


def report_of(tiny: TinyFederation, plan_id: str) -> AuditReport:
    path = open_workspace(tiny.sites[SILO], plan_id).audit_path
    return AuditReport.parse(path.read_bytes(), subject="audit.json")


def test_audit_attacks_as_many_members_as_are_held_out_and_keeps_every_figure(
    audited: PlannedFederation,
) -> None:
    report = report_of(*audited)
    (expert,) = report.experts
    assert (report.num_holdout_units, expert.num_members, expert.num_samples) == (20, 20, 40)
    assert len(expert.deciding_auc) == len(expert.deciding_tpr) == 3
    assert any("beside the shadows" in figure.name for figure in expert.auc)
    assert len(expert.auc) == len(expert.tpr) > 20 and {copy.name for copy in expert.copies} == {
        "pixels",
        "features",
    }
    assert expert.control is not None and report.reason


def test_audit_leaves_the_worst_pairs_in_the_private_folder_and_no_other_trace(
    audited: PlannedFederation,
) -> None:
    tiny, plan_id = audited
    folder = open_workspace(tiny.sites[SILO], plan_id).audit_folder(SILO)
    assert sorted(path.name for path in folder.iterdir()) == ["pairs.safetensors", "worst.json"]
    worst = read_worst(folder)
    assert worst is not None
    assert len(worst[0].pair_images) == len(worst[1]["images"]) == 12
    assert not list(
        (open_workspace(tiny.sites[SILO], plan_id).folder / "experts").glob("audit-*/*/*")
    )


def test_review_shows_figures_and_pairs_as_pictures_and_the_draft_has_none_of_them(
    audited: PlannedFederation, tmp_path: Path
) -> None:
    tiny = audited[0].copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    tiny.work(SILO, until="awaiting_approval")
    facts = gather_facts(site)
    (leaks,) = expert_leaks(site, facts)
    assert len(leaks.pairs) == 12 and all(
        cell.startswith("data:image/png") for pair in leaks.pairs for cell in pair[:2]
    )
    page = render("silo", "approve.html.jinja", facts=facts, draft=facts.draft, findings=(leaks,))
    assert page.count("data:image/png") == 24 and leaks.rows[0][0] in page
    assert leaks.rows[0][0] in review_text(site, facts)
    draft = json.loads(facts.draft.encode())
    assert draft["audit"].keys() == {"verdict", "digest", "waiver"}
    assert {file.path for file in facts.files} == {
        "counts.safetensors",
        "sketch.safetensors",
        expert_path(SILO, SILO),
        submission_path(SILO),
    }


def test_killed_audit_goes_on_behind_the_last_part_and_ends_with_the_same_figures(
    audited: PlannedFederation, tmp_path: Path
) -> None:
    tiny = audited[0].copy(tmp_path / "copy")
    plan_id = audited[1]
    work = open_workspace(tiny.sites[SILO], plan_id)
    report = report_of(tiny, plan_id)
    scored = []
    work.audit_path.unlink()
    worker = Worker(tiny.sites[SILO], tiny.key(SILO), lambda state: None)
    images = worker.read_cohort(worker.accepted_plan())
    again = gather_audit_inputs(
        tiny.sites[SILO], worker.accepted_plan(), work, worker.policy, images, worker.cohort_path
    )

    def tell(num_done: int, total: int) -> None:
        scored.append(num_done)
        if any(work.audit_folder(SILO).rglob("scores-reference.safetensors")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_experts(again, tell, lambda: False)
    (kept,) = work.audit_folder(SILO).rglob("reference.safetensors")
    before = (kept.stat().st_mtime_ns, len(scored))
    times = []
    audit_experts(
        again, lambda num_done, total: times.append(kept.stat().st_mtime_ns), lambda: False
    )
    assert set(times) == {before[0]} and scored[-1] > 0
    assert report_of(tiny, plan_id).experts == report.experts


def test_expert_learns_nothing_of_the_units_held_out(audited: PlannedFederation) -> None:
    tiny, plan_id = audited
    worker = Worker(tiny.sites[SILO], tiny.key(SILO), lambda state: None)
    accepted = worker.accepted_plan()
    images = worker.read_cohort(worker.accepted_plan())
    inputs = gather_audit_inputs(
        tiny.sites[SILO], accepted, worker.workspace(), worker.policy, images, worker.cohort_path
    )
    assert int(inputs.holdout_N.sum()) == 20
    assert torch.equal(inputs.holdout_N, holdout_mask(images, worker.policy))
    assert worker.workspace().record(SILO).num_images == 60


def test_same_figures_have_another_digest_whenever_they_are_written_down(
    audited: PlannedFederation,
) -> None:
    report = report_of(*audited)
    figures = report.model_dump(exclude={"salt", "format"})
    again = AuditReport.model_validate(figures)
    assert again.model_dump(exclude={"salt"}) == report.model_dump(exclude={"salt"})
    assert again.digest != report.digest


def test_statistics_and_number_of_units_count_the_units_held_out(
    audited: PlannedFederation, tmp_path: Path
) -> None:
    tiny = audited[0].copy(tmp_path / "copy")
    site = tiny.sites[SILO]
    path = open_workspace(site, audited[1]).audit_path
    path.write_bytes(report_of(tiny, audited[1]).model_copy(update={"verdict": "pass"}).encode())
    write_policy(site, POLICY | {"audit": {"required": True, **HOLDS}})
    tiny.work(SILO)
    (sent,) = site.outbox.glob(f"*/1/{submission_path(SILO)}")
    submission = Submission.parse(sent.read_bytes(), subject="submission.json")
    assert (submission.num_units, submission.experts[0].num_images) == (80, 80)
    assert submission.audit.verdict == "pass" and submission.audit.waiver is None
    names = {path.name for path in (site.outbox / audited[1]).rglob("*") if path.is_file()}
    assert not names & {"worst.json", "pairs.safetensors", "audit.json"}


def cohort_of(
    tmp_path: Path, num: int, *, patients: bool = False, salt: bytes = b"s" * 32
) -> Cohort:
    np.savez(tmp_path / "data.npz", **cohort(num, 0.5, seed=0, patients=patients))  # type: ignore[arg-type]
    return cohort_at(
        tmp_path / "data.npz",
        DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0)),
        min_images=1,
        salt=salt,
        unit="patient" if patients else "image",
        num_classes=None,
    )


def policy(**audit: float) -> Policy:
    return Policy.model_validate({"audit": HOLDS | audit, "training": {"min_images": 10}})


def test_holdout_is_secret_and_the_same_whenever_it_is_drawn(tmp_path: Path) -> None:
    first = holdout_mask(cohort_of(tmp_path, 80), policy())
    again = holdout_mask(cohort_of(tmp_path, 80), policy())
    other = holdout_mask(cohort_of(tmp_path, 80, salt=b"t" * 32), policy())
    assert torch.equal(first, again) and not torch.equal(first, other) and int(first.sum()) == 20


def test_all_images_of_a_patient_are_held_out_or_none(tmp_path: Path) -> None:
    cohort = cohort_of(tmp_path, 200, patients=True)
    held_N = holdout_mask(cohort, policy())
    held = set(cohort.unit_N[held_N].tolist())
    assert not held & set(cohort.unit_N[~held_N].tolist()) and len(held) == cohort.num_units // 4


@pytest.mark.parametrize(
    ("num", "terms", "expected"),
    [
        (3010, {}, 301),
        (2999, {}, 300),
        (1200, {}, 300),
        (1199, {}, 0),
        (2999, {"max_holdout_share": 0.1}, 0),
        (50_000, {}, 1000),
        (3000, {"holdout_share": 0.0}, 0),
        (500, {"min_holdout_units": 125}, 125),
        (400, {"holdout_share": 0.5, "min_holdout_units": 50}, 0),  # fewer than 300 would be left
        (700, {"holdout_share": 0.5, "min_holdout_units": 50}, 350),
    ],
)
def test_small_sites_hold_nothing_out(num: int, terms: dict[str, float], expected: int) -> None:
    assert num_holdout_units(num, Policy.model_validate({"audit": terms})) == expected


def test_plan_that_a_site_holds_too_little_out_for_is_refused_before_training(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path, {SILO: 80})
    plan_id = tiny.sign(recipe(audit=LOOSE | {"min_holdout_units": 21}))
    tiny.deliver_plan(SILO, plan_id)
    write_policy(tiny.sites[SILO], POLICY | {"audit": {"required": True, **HOLDS}})
    with pytest.raises(AuditError, check=has_subject("leak audit")):
        tiny.work(SILO, until="assigned")
    assert not (open_workspace(tiny.sites[SILO], plan_id).folder / "experts").exists()


@pytest.mark.slow
def test_every_expert_of_a_cluster_is_audited_with_held_out_units_of_its_own_and_by_class(
    tmp_path: Path,
) -> None:
    tiny = TinyFederation.create(tmp_path, {SILO: 200}, patients=True)
    plan_id = tiny.sign(
        recipe(
            audit=LOOSE | {"min_holdout_units": 10},
            partition={"kind": "silo_cluster", "min_images": 2},
            condition={"kind": "class", "num_classes": 2, "drop": 0.1},
            statistics={
                "unit": "patient",
                "total": {"epsilon": 16.0, "delta": 0.0},
                "counts": {"epsilon": 8.0, "num_groups": 4},
                "class_counts": {"epsilon": 8.0, "num_classes": 2},
            },
            router={"kind": "counts"},
        )
    )
    tiny.deliver_plan(SILO, plan_id)
    terms = {
        "required": True,
        "holdout_share": 0.4,
        "min_holdout_units": 10,
        "num_samples": 20,
    } | MOST
    privacy = {"unit": "patient", "max_epsilon": 20.0, "budget_epsilon": 20.0}
    write_policy(tiny.sites[SILO], POLICY | {"audit": terms, "privacy": privacy})
    bundle = tiny.federation.bundle(plan_id)
    waive(tiny.sites[SILO], sha256_hex((bundle / "targets" / plan_id / "plan.json").read_bytes()))
    tiny.work(SILO, until="audited")
    report = report_of(tiny, plan_id)
    assert [audit.expert_id for audit in report.experts] == [f"{SILO}-0", f"{SILO}-1"]
    measured = [audit for audit in report.experts if audit.auc]
    assert measured and all(
        10 <= audit.num_holdout_units <= report.num_holdout_units for audit in measured
    )
    # the larger expert may meet every patient
    fewest = min(audit.num_holdout_units for audit in report.experts)
    assert fewest < report.num_holdout_units


def test_audit_of_an_expert_with_a_base_compares_it_with_that_base(tmp_path: Path) -> None:
    """So it measures what the silo added: no reference is trained, and the base's own errors take its place."""
    tiny = TinyFederation.create(tmp_path / "tiny", {SILO: 80})
    architecture = {"kind": "dit", "patch": 2, "hidden": 16, "depth": 1, "heads": 2}
    network = build_expert(Dit.model_validate(architecture), (1, 4, 4), seed=3)
    save_tensors(tmp_path / "base.safetensors", network.state_dict())
    base = {"kind": "file", "file": str(tmp_path / "base.safetensors"), "licence": "MIT"}
    plan_id = tiny.sign(recipe(audit=LOOSE, base=base))
    tiny.deliver_plan(SILO, plan_id)
    write_policy(tiny.sites[SILO], POLICY | {"audit": {"required": True, **HOLDS}})
    tiny.work(SILO, until="auditing")
    worker = Worker(tiny.sites[SILO], tiny.key(SILO), lambda state: None)
    accepted = worker.accepted_plan()
    work = worker.workspace()
    inputs = gather_audit_inputs(
        tiny.sites[SILO],
        accepted,
        work,
        worker.policy,
        worker.read_cohort(accepted),
        worker.cohort_path,
    )
    names: set[str] = set()

    def note(num_done: int, total: int) -> None:
        names.update(path.name for path in work.audit_folder(SILO).rglob("*.safetensors"))

    audit_experts(inputs, note, lambda: False)
    assert "scores-reference.safetensors" in names, "something was compared"
    assert "shadow-0.safetensors" in names, "shadows are trained as always"
    assert "reference.safetensors" not in names
    assert report_of(tiny, plan_id).experts[0].num_members == 20
