"""What a plan makes a silo's machine do, and how long that takes on named devices; estimates before anything starts."""

from dataclasses import dataclass
from math import prod

from ddm.audit.effort import share_of_training
from ddm.footprint import training_bytes
from ddm.io.tensors import stored_bytes
from ddm.models import count_flops, expected_tensors
from ddm.models.network import FLOAT_BYTES
from ddm.planning.devices import DEVICES, MIN_STEP_S, UTILISATION, Device
from ddm.protocol.latent import Autoencoder
from ddm.protocol.learning import FullAdaptation, OwnAdaptation
from ddm.protocol.plan import Plan, max_experts_per_silo
from ddm.statistics.of_plan import statistics_of
from ddm.training.checkpoints import KEPT

# A sample of a private step beside one of a plain step: the slowest loop that ADR 0057 measured.
_PRIVATE_SLOWDOWN = 2.3
TENSORS_OF_CHECKPOINT = 4
"""A checkpoint holds the weights, their average and two moments of the optimizer."""
# Of an image in the cohort's table.
_ROW_BYTES = 64
# Documents, logs, the ledger.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True)
class PrivateStep:
    """What a step of private training computes, beside a plain one of `batch_size` samples.

    Attributes:
        samples: in a step, on average: units, times images, times draws.
        slower: how many times as long a sample takes as in a plain step, by the table of ADR 0057.
        factor: how many times as long a step takes.
    """

    samples: float
    slower: float
    factor: float


def estimate_private_step(plan: Plan) -> PrivateStep:
    """Return what a step of a plan that trains privately computes at the silo whose units have most images.

    Raises:
        ValueError: the plan does not.
    """
    terms = plan.expert.privacy
    if terms is None:
        raise ValueError("the plan does not train privately")
    # The largest of all silos in both, so that no silo trains longer than the operator is told.
    num_units = 0
    images_per_unit = 0.0
    for agreed in plan.agreed.values():
        silo_units = agreed.units(plan.statistics.unit)
        num_units = max(num_units, silo_units)
        # A card states totals, so that this is an average: single units may have more images.
        images_per_unit = max(images_per_unit, agreed.images / silo_units)
    if plan.transform and plan.transform.slices:
        images_per_unit *= plan.transform.slices.count  # a card counts pictures

    units_in_step = min(num_units, terms.units_per_step)
    samples = units_in_step * min(images_per_unit, terms.images_per_unit) * terms.draws
    factor = _PRIVATE_SLOWDOWN * samples / plan.expert.training.batch_size
    return PrivateStep(samples, _PRIVATE_SLOWDOWN, factor)


@dataclass(frozen=True)
class Workload:
    """What a plan makes one silo's machine compute and keep, at most.

    Attributes:
        training_flops: operations of training all of its experts; of private training about.
        training_steps: of all of these trainings.
        audit_flops: operations of the leak audit of all of these, with as many units held out as the plan needs at
            least; 0 where the plan requires none.
        memory_bytes: of a training step.
        disk_bytes: written into the site's private folder, without the audit's own files and vectors of captions.
        in_bf16: whether a GPU multiplies in bfloat16 for it.
    """

    training_flops: float
    training_steps: int
    audit_flops: float
    memory_bytes: int
    disk_bytes: int
    in_bf16: bool


def estimate_work(plan: Plan, silo_id: str | None = None, batch_parts: int = 1) -> Workload:
    """Return what a plan makes the machine of a silo do.

    Args:
        plan: the plan.
        silo_id: the silo; None for the largest of those that train.
        batch_parts: the number of parts into which its machine divides a batch.
    """
    training = plan.expert.training
    _, sample_flops = count_flops(plan.expert.architecture, plan.expert_shape, plan.condition)
    # All experts of the silo, each as if it were trained plainly.
    plain_flops = float(sample_flops) * training.batch_size * training.num_steps
    plain_flops *= max_experts_per_silo(plan)
    audit_flops = 0.0
    if plan.audit.required:
        # The audit's own trainings are plain ones, also where the expert's is private.
        audit_flops = share_of_training(training, plan.audit.min_holdout_units) * plain_flops
    training_flops = plain_flops
    if plan.expert.privacy:
        training_flops *= estimate_private_step(plan).factor

    silo_ids = plan.silos if silo_id is None else (silo_id,)
    training_sizes = [plan.agreed[name] for name in silo_ids]
    largest = max(training_sizes, key=lambda agreed: agreed.images)
    num_images = largest.images
    if plan.transform and plan.transform.slices:
        num_images *= plan.transform.slices.count
    return Workload(
        training_flops=training_flops,
        training_steps=training.num_steps * max_experts_per_silo(plan),
        audit_flops=audit_flops,
        memory_bytes=training_bytes(plan, batch_parts),
        disk_bytes=plan_bytes(plan, num_images, largest.units(plan.statistics.unit)),
        in_bf16=training.precision != "fp32",
    )


@dataclass(frozen=True)
class DeviceEstimate:
    """How long a plan takes on a device, by its published rate: an estimate that nobody measured.

    Attributes:
        device: the device.
        train_s: seconds of training all experts of a silo.
        audit_s: seconds of the leak audit of all of these.
        needs_parts: whether a training step takes more memory than the device has, unless its batch is divided.
    """

    device: Device
    train_s: float
    audit_s: float
    needs_parts: bool


def estimate_on_devices(work: Workload) -> tuple[DeviceEstimate, ...]:
    """Return how long some work takes on each device of the table, on one of them alone."""
    estimates = []
    for device in DEVICES:
        peak_flops = device.bf16_flops if work.in_bf16 else device.fp32_flops
        rate = UTILISATION * peak_flops
        train_s = max(work.training_flops / rate, work.training_steps * MIN_STEP_S)
        # The audit consists of steps and evaluations of the same experts, which take as long for an operation.
        audit_s = train_s * work.audit_flops / work.training_flops
        estimates.append(
            DeviceEstimate(
                device=device,
                train_s=train_s,
                audit_s=audit_s,
                needs_parts=work.memory_bytes > device.memory_bytes,
            )
        )
    return tuple(estimates)


def plan_bytes(plan: Plan, num_images: int, num_units: int) -> int:
    """Return what one plan writes into `private/` at most, without the vectors of captions, whose length varies.

    Two checkpoints of every expert stay, and a third is written beside them; where only an adaptation is trained, its
    checkpoints are small and not counted.
    """
    experts = bytes_of_experts(
        expert_bytes(plan), checkpoint_bytes(plan), max_experts_per_silo(plan)
    )
    # Each statistic is kept as it was drawn and as it leaves.
    statistics = 0
    for statistic in statistics_of(plan.statistics).values():
        statistics += 2 * stored_bytes(statistic.tensor_specs(num_units))
    latents = 0
    if isinstance(plan.latent, Autoencoder):
        latents = FLOAT_BYTES * prod(plan.expert_shape) * num_images
    return experts + statistics + latents + _ROW_BYTES * num_images + _SMALL_BYTES


def bytes_of_experts(expert: int, checkpoint: int, num_experts: int = 1) -> int:
    """Return what experts take on disk while the last one is trained.

    Args:
        expert: bytes of an expert's file.
        checkpoint: bytes of one of its checkpoints.
        num_experts: the number of experts of the silo.
    """
    # One more checkpoint is written before the oldest is removed.
    return num_experts * (expert + KEPT * checkpoint) + checkpoint


def expert_bytes(plan: Plan) -> int:
    """Return the size of an expert's file."""
    return stored_bytes(
        expected_tensors(plan.expert.architecture, plan.expert_shape, plan.condition)
    )


def checkpoint_bytes(plan: Plan) -> int:
    """Return the size of a checkpoint; those of adaptations are small and not counted."""
    if isinstance(plan.expert.adaptation, FullAdaptation | OwnAdaptation):
        return TENSORS_OF_CHECKPOINT * expert_bytes(plan)
    return 0
