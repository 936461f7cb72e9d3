"""What a new site is told at once: everything that a worker would otherwise say after days."""

import pytest

from silo.audit.holdout import num_holdout_units
from silo.config import ApprovalPolicy, AuditPolicy, Policy, PrivacyPolicy
from silo.data.first_look import UnitCounts
from silo.outlook import Machine, outlook

LICENCE = "CC-BY-4.0"
MACHINE = Machine(num_gpus=0, num_cores=2, flops_per_s=1e12)


def rows_for(counts: UnitCounts, policy: Policy, machine: Machine = MACHINE) -> dict[str, str]:
    return dict(outlook(counts, policy, LICENCE, machine))


def test_site_below_min_images_is_told_so() -> None:
    assert "TOO FEW" in rows_for(UnitCounts(299, 299), Policy())["training"]
    assert "TOO FEW" not in rows_for(UnitCounts(300, 300), Policy())["training"]


@pytest.mark.parametrize("num_patients", [1199, 1200])
def test_site_is_told_whether_the_audit_can_measure_there(num_patients: int) -> None:
    policy = Policy()
    row = rows_for(UnitCounts(9000, num_patients), policy)["leak audit"]
    assert ("CANNOT MEASURE" in row) == (num_holdout_units(num_patients, policy) == 0)
    assert ("CANNOT MEASURE" in row) == (num_patients < 1200)


def test_audit_counts_the_units_that_the_site_protects() -> None:
    policy = Policy(privacy=PrivacyPolicy(unit="image"))
    assert "CANNOT MEASURE" not in rows_for(UnitCounts(9000), policy)["leak audit"]


def test_audit_that_the_policy_does_not_require_is_not_announced() -> None:
    policy = Policy(audit=AuditPolicy(required=False))
    assert rows_for(UnitCounts(10, 10), policy)["leak audit"].startswith("not required")


def test_licence_that_the_policy_does_not_name_is_announced_as_a_refusal() -> None:
    policy = Policy(approval=ApprovalPolicy(licences=("CC0-1.0",)))
    assert "NOT ALLOWED" in rows_for(UnitCounts(10, 10), policy)["licence"]
    policy = Policy(approval=ApprovalPolicy(licences=(LICENCE,)))
    assert "NOT ALLOWED" not in rows_for(UnitCounts(10, 10), policy)["licence"]


def test_machine_is_described_by_what_it_trains_with() -> None:
    assert "16 min 40 s" in rows_for(UnitCounts(10, 10), Policy())["machine"]
    machine = Machine(num_gpus=2, num_cores=2, flops_per_s=1e12)
    assert rows_for(UnitCounts(10, 10), Policy(), machine)["machine"].startswith(
        "GPUs that torch finds: 2"
    )
