"""The figures of the page on sizing: against the published ones of the networks, and against the estimate of a plan."""

import pytest

from ddm.models import count_flops
from ddm.planning.estimates import estimate_work
from ddm.protocol.architecture import Dit
from ddm.protocol.plan import Plan
from tests.support.documents import plan_document, to_bytes
from tools.reference.sizing import (
    BATCH_SIZE,
    CASES,
    IMAGES_AT_ONCE,
    PASSES,
    Case,
    workload_of,
)

# Peebles and Xie 2023, of 256 x 256 and of 512 x 512 pixels: billions, a product and its sum counted as one.
PUBLISHED_GFLOPS = {
    ("S/2", (4, 32, 32)): 6.06,
    ("B/2", (4, 32, 32)): 23.01,
    ("L/2", (4, 32, 32)): 80.71,
    ("XL/2", (4, 32, 32)): 118.64,
    ("XL/2", (4, 64, 64)): 524.60,
}
PUBLISHED_CASES = [case for case in CASES if (case.size, case.shape) in PUBLISHED_GFLOPS]
NUM_IMAGES = 10_000


def test_page_lists_every_published_size_that_is_known_here() -> None:
    assert len(PUBLISHED_CASES) == len(PUBLISHED_GFLOPS)


@pytest.mark.parametrize("case", PUBLISHED_CASES, ids=lambda case: f"{case.size} {case.shape}")
def test_operations_of_a_case_are_three_times_those_that_are_published(case: Case) -> None:
    published = PUBLISHED_GFLOPS[case.size, case.shape]
    _, training_flops = count_flops(Dit.published_size(case.size), case.shape)
    # A product and a sum are two operations here; a training step evaluates the network and computes two gradients.
    assert training_flops == pytest.approx(2 * 3 * published * 1e9, rel=0.01)


def test_work_of_a_case_is_that_of_a_plan_with_the_same_numbers() -> None:
    case = CASES[0]
    num_steps = NUM_IMAGES * PASSES // BATCH_SIZE
    document = plan_document(
        silos=["north"],
        agreed={"north": {"images": NUM_IMAGES, "patients": None}},
        data={"shape": list(case.shape), "range": [-1.0, 1.0]},
    )
    architecture = Dit.published_size(case.size)
    document["expert"]["architecture"] = architecture.model_dump(mode="json")
    document["expert"]["training"] |= {
        "num_steps": num_steps,
        "batch_size": BATCH_SIZE,
        "precision": "bf16",
    }
    plan = Plan.parse(to_bytes(document), subject="plan")
    planned = estimate_work(plan, batch_parts=BATCH_SIZE // IMAGES_AT_ONCE)
    listed = workload_of(case, NUM_IMAGES)
    assert listed.training_flops == planned.training_flops
    assert listed.training_steps == planned.training_steps
    assert listed.audit_flops == planned.audit_flops
    assert listed.memory_bytes == planned.memory_bytes
    assert listed.in_bf16 == planned.in_bf16
    # A plan writes its statistics and documents as well, which are small.
    assert 0 < planned.disk_bytes - listed.disk_bytes < 10**7
