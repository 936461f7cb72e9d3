"""The page docs/explanation/sizing.md: what training takes, by the estimates that `aggregator plan` shows."""

from collections.abc import Iterator
from dataclasses import dataclass

from ddm.audit.effort import share_of_training
from ddm.io.tensors import stored_bytes
from ddm.models import count_flops, expected_tensors, network_size
from ddm.planning.devices import DEVICES, MIN_STEP_S, UTILISATION
from ddm.planning.estimates import (
    TENSORS_OF_CHECKPOINT,
    Workload,
    bytes_of_experts,
    estimate_on_devices,
)
from ddm.protocol.architecture import Dit, NoCondition
from ddm.protocol.learning import Training

BATCH_SIZE = 128
# Images that a machine computes at once: `accumulate` in silo.toml divides a batch.
IMAGES_AT_ONCE = 32
PASSES = 200
NUM_IMAGES = (3_000, 10_000, 30_000, 100_000)
# Units held out for an audit that reaches a verdict.
HOLDOUT_UNITS = 300


@dataclass(frozen=True)
class Case:
    """A size of images, with an expert for it.

    Attributes:
        images: the images, in words.
        size: the published size of the transformer.
        shape: of what the expert sees: channels, height, width.
    """

    images: str
    size: str
    shape: tuple[int, int, int]


CASES = (
    Case("64 x 64, grey", "S/4", (1, 64, 64)),
    Case("64 x 64, grey", "B/4", (1, 64, 64)),
    Case("128 x 128, grey", "B/8", (1, 128, 128)),
    Case("256 x 256, latents of 4 x 32 x 32", "S/2", (4, 32, 32)),
    Case("256 x 256, latents of 4 x 32 x 32", "B/2", (4, 32, 32)),
    Case("256 x 256, latents of 4 x 32 x 32", "L/2", (4, 32, 32)),
    Case("256 x 256, latents of 4 x 32 x 32", "XL/2", (4, 32, 32)),
    Case("512 x 512, latents of 4 x 64 x 64", "B/2", (4, 64, 64)),
    Case("512 x 512, latents of 4 x 64 x 64", "XL/2", (4, 64, 64)),
)


def workload_of(case: Case, num_images: int) -> Workload:
    """Return what one expert takes that is trained on a number of images.

    Args:
        case: images and expert.
        num_images: that the silo trains on; the training sees each `PASSES` times.
    """
    architecture = Dit.published_size(case.size)
    num_steps = num_images * PASSES // BATCH_SIZE
    training = Training(
        num_steps=num_steps,
        batch_size=BATCH_SIZE,
        learning_rate=1e-4,
        weight_decay=0.0,
        ema_width=0.1,
        precision="bf16",
    )
    _, sample_flops = count_flops(architecture, case.shape)
    training_flops = float(sample_flops) * BATCH_SIZE * num_steps
    expert = expert_file_bytes(case)
    return Workload(
        training_flops=training_flops,
        training_steps=num_steps,
        audit_flops=share_of_training(training, HOLDOUT_UNITS) * training_flops,
        memory_bytes=network_size(architecture, case.shape, NoCondition()).training_bytes(
            IMAGES_AT_ONCE
        ),
        disk_bytes=bytes_of_experts(expert, TENSORS_OF_CHECKPOINT * expert),
        in_bf16=True,
    )


def expert_file_bytes(case: Case) -> int:
    """Return the size of an expert's file, which is what a silo sends."""
    architecture = Dit.published_size(case.size)
    return stored_bytes(expected_tensors(architecture, case.shape, NoCondition()))


def sizing_page() -> str:
    """Return the page."""
    return "".join([_head(), *_sizes(), _TIME, *_hours(), _BY_NUMBER, *_hours_by_number(), _REST])


def _head() -> str:
    rates = f"operations over {UTILISATION:.0%} of the rate that the maker publishes"
    least = f"at least {1000 * MIN_STEP_S:.0f} ms for each training step"
    on_gpu = "[an H200](../results/benchmarks.md#on-a-gpu)"
    measured = f"{on_gpu} reached 27% with DiT-B/2, and 9.4 ms with a small DiT"
    return f"""# Sizing

This page says what a silo's machine needs: hours of a GPU, memory, disk and network. `make docs` writes it from the
code that `aggregator plan` and `silo status` take their estimates from, so that it agrees with them. Both show the
estimate of your own plan, also for volumes, U-Nets, texts and private training, which are not listed here.

| number | where it comes from |
| --- | --- |
| weights, size of the expert, bytes that are sent | **exact**: they follow from the shapes of the network |
| operations | **counted** by torch, matrix products and convolutions only |
| memory | **computed** in float32, an upper estimate; it was compared with training on a CPU |
| disk | **computed** from the sizes of the files |
| hours of a GPU | **estimated**: {rates}, and {least}; {measured} |

## Memory, disk and network

The transformers have the published sizes of DiT (Peebles and Xie 2023). Memory is that of a training step of
{IMAGES_AT_ONCE} images at once; larger batches are divided (`accumulate` in `silo.toml`). Disk is that of one expert
with its checkpoints. Network is what a silo sends in one plan: the expert, once. The noised statistics beside it take
less than a few megabytes.

| images | expert | weights, millions | operations of a training sample, GFLOP | memory, GB | disk, GB | network, GB |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""


def _sizes() -> Iterator[str]:
    for case in CASES:
        architecture = Dit.published_size(case.size)
        work = workload_of(case, NUM_IMAGES[0])
        size = network_size(architecture, case.shape, NoCondition())
        _, sample_flops = count_flops(architecture, case.shape)
        cells = (
            case.images,
            f"DiT-{case.size}",
            f"{size.parameters / 1e6:.0f}",
            f"{sample_flops / 1e9:.1f}",
            f"{work.memory_bytes / 1e9:.1f}",
            f"{work.disk_bytes / 1e9:.1f}",
            f"{expert_file_bytes(case) / 1e9:.2f}",
        )
        yield f"| {' | '.join(cells)} |\n"


_TIME = f"""
## Hours of one GPU

Hours of training one expert on 10,000 images, each seen {PASSES} times in batches of {BATCH_SIZE}, in bfloat16; the
leak audit is in brackets. **These times are estimates.** How often the training should see each image is the
choice of the recipe (`num_steps` times `batch_size`, over the number of images); twice as often takes twice as long. A
star marks experts whose step on {IMAGES_AT_ONCE} images needs more memory than the device has: their batch must be
divided further, or the expert cannot be trained there.

"""


def _hours() -> Iterator[str]:
    names = [device.name for device in DEVICES]
    yield f"| images | expert | {' | '.join(names)} |\n"
    yield f"| --- | --- |{' ---: |' * len(DEVICES)}\n"
    for case in CASES:
        cells = [case.images, f"DiT-{case.size}"]
        for estimate in estimate_on_devices(workload_of(case, 10_000)):
            cell = f"{_hours_of(estimate.train_s)} ({_hours_of(estimate.audit_s)})"
            if estimate.needs_parts:
                cell += " *"
            cells.append(cell)
        yield f"| {' | '.join(cells)} |\n"


def _hours_of(seconds: float) -> str:
    hours = seconds / 3600
    if hours < 10:
        return f"{hours:.1f}"
    return f"{hours:.0f}"


_BY_NUMBER = f"""
The same for more and for fewer images, on one {DEVICES[0].name}, training and audit together:

"""


def _hours_by_number() -> Iterator[str]:
    counts = [f"{num_images:,} images" for num_images in NUM_IMAGES]
    yield f"| images | expert | {' | '.join(counts)} |\n"
    yield f"| --- | --- |{' ---: |' * len(NUM_IMAGES)}\n"
    for case in CASES:
        cells = [case.images, f"DiT-{case.size}"]
        for num_images in NUM_IMAGES:
            fastest = estimate_on_devices(workload_of(case, num_images))[0]
            cells.append(_hours_of(fastest.train_s + fastest.audit_s))
        yield f"| {' | '.join(cells)} |\n"


_REST = """
## Other disk space and time

- **Transformed images.** The site keeps one copy. With `storage = "uint8"` a value takes one byte, so 10,000 images of
  256 x 256 in three channels take 2 GB. A value of a latent takes four bytes: 10,000 latents of 4 x 32 x 32 take 0.16
  GB.
- **Scanning.** On two cores, [a scan](../results/scanning.md) takes a few milliseconds for each image.
- **Sending.** [Transfer](transfer.md) was measured on two cores at 16.5 MB/s, so 1 GB takes a minute. An interrupted
  transfer continues where it stopped.
- **Several GPUs.** `processes` in `silo.toml` divides the work ([train beyond one
  machine](../how-to/train-beyond-one-machine.md)). Several GPUs were not measured.
- **Experts.** A plan with an expert for each cluster trains several experts at a silo; time, disk and network grow with
  their number.
- **Aggregator.** It needs no GPU for the router `counts`. Its disk holds every expert: the number of silos times the
  column *network*, for each plan and again for the release.
- **Researcher.** Sampling loads only the experts that it needs. `ddm sample` states the memory of a request, and
  refuses one that does not fit.
"""
