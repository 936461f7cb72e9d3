"""How many bytes a plan takes: each of its files, its inspection, training, sampling.

A site refuses by these figures before it opens a file of the plan, and a researcher's commands before they load one.
They are upper estimates for float32 on a CPU. Parameters are counted on networks without memory (torch's meta device);
activations follow by arithmetic from the plan's numbers, so that no number of a plan, however large, is ever allocated.
"""

from functools import lru_cache
from itertools import pairwise
from math import ceil, prod

import torch

from ddm.encoders.autoencoder import empty_autoencoder
from ddm.models import network_size
from ddm.models.adaptation import num_added_parameters
from ddm.models.network import FLOAT_BYTES, Activations, NetworkSize, num_parameters, size_of
from ddm.models.token_router import TokenRouter
from ddm.protocol.architecture import ClassCondition, Condition, Dit, NoCondition, TextCondition
from ddm.protocol.base import MAX_DOCUMENT_BYTES
from ddm.protocol.encoder import HogEncoderSpec, PcaEncoderSpec, TimmEncoderSpec
from ddm.protocol.latent import Autoencoder, DiffusersKlLatent, LatentSpec
from ddm.protocol.plan import Plan
from ddm.protocol.routers import LearnedSettings, SamplesSettings

# The largest header of a file of tensors.
HEADER_BYTES = 1 << 20
_INTEGER_BYTES = 8
_DOUBLE_BYTES = 8

# Images that a network of timm, and the principal components, encode at once.
_TIMM_BATCH = 64
_PCA_BATCH = 1024
# Values of the images whose gradients are computed at once, and copies of each value meanwhile.
_HOG_VALUES = 1 << 20
_HOG_COPIES = 32

# Of a weight in private training: three sums in double precision, and a gradient, as it is and clipped.
_PRIVATE_COPIES = 8
# Of the weights where averages of two more widths are kept: both, and both as they are written.
_SNAPSHOT_COPIES = 4

# Numbers that the learned router reads of the time.
_TIME_FEATURES = 4

# Of each image that is encoded or decoded, beside it: itself, its tiles, which overlap, and its copies.
_IMAGE_COPIES = 8
# Values of an autoencoder's residual block, for each value of its widest layer.
_AUTOENCODER_FORWARD = 6
# Bytes of an autoencoder's first layer, and samples, in one block that is decoded.
_DECODED_BYTES = 1 << 26
_MAX_DECODED = 64

# Bytes of the samples that are integrated together.
_IN_FLIGHT_BYTES = 1 << 26
# Of the values that are integrated together: states, memories, velocities and guesses of the solver.
_SOLVER_COPIES = 20
# Of one sample and step in the table of the experts that samples followed, and of the whole table with its copies.
_FOLLOWED_BYTES = 96
_MAX_FOLLOWED_BYTES = 3 << 24

# Counts within this number over epsilon of a noised count are possible; noise beyond it is negligible.
_NOISE_REACH = 80
# Values in one block of the log densities of samples, experts and groups.
_ROUTED_VALUES = 1 << 19


def expert_size(plan: Plan) -> NetworkSize:
    """Return the size of one expert."""
    return network_size(plan.expert.architecture, plan.expert_shape, plan.condition)


@lru_cache(maxsize=32)
def autoencoder_size(latent: Autoencoder, shape: tuple[int, ...]) -> NetworkSize:
    """Return the size of a latent's autoencoder; its activations are those of decoding one sample, or one tile.

    Raises:
        SetupError: the library that builds it is not installed.
    """
    network = empty_autoencoder(latent, shape)
    tile = latent.at_once(shape)
    widest = 0
    for level in range(latent.levels):
        # The decoder doubles the sides before it narrows, so a level also has the width of the next one.
        width = max(latent.channels[level : level + 2])
        num_places = prod(side // 2**level for side in tile[1:])
        widest = max(widest, width * num_places)
    activations = Activations(
        widest=widest,
        forward=_AUTOENCODER_FORWARD * widest,
        gradient=0,
    )
    return NetworkSize(parameters=num_parameters(network), buffers=0, activations=activations)


@lru_cache(maxsize=32)
def token_router_size(
    router: SamplesSettings,
    shape: tuple[int, ...],
    num_experts: int,
    condition: Condition = NoCondition(),
) -> NetworkSize:
    """Return the size of the samples router.

    Args:
        router: its sizes.
        shape: one sample in the experts' space.
        num_experts: the number of experts that it tells apart.
        condition: the condition of the experts, which the router may read.
    """
    sizes = Dit(
        patch=router.patch,
        hidden=router.hidden,
        depth=router.depth,
        heads=router.heads,
    )
    router_condition = router.router_condition(condition)
    with torch.device("meta"):
        network = TokenRouter(sizes, shape, num_experts, router_condition)
    return size_of(network)


def perceptron_parameters(inputs: int, hidden: int, depth: int, outputs: int) -> int:
    """Return the parameters of a perceptron with `depth` hidden layers."""
    widths = [inputs, *[hidden] * depth, outputs]
    return sum(num_in * num_out + num_out for num_in, num_out in pairwise(widths))


def widest_layer(plan: Plan) -> tuple[str, int]:
    """Return which network has the layer with the most values for one sample, and their number."""
    widths = {f"expert ({plan.expert.architecture.kind})": expert_size(plan).activations.widest}
    if isinstance(plan.latent, Autoencoder):
        size = autoencoder_size(plan.latent, plan.data.shape)
        widths["autoencoder"] = size.activations.widest
    if isinstance(plan.router, SamplesSettings):
        widths["router (samples)"] = _token_router_size(plan, plan.router, 1).activations.widest
    if isinstance(plan.encoder, TimmEncoderSpec):
        widths["encoder (timm)"] = _timm_values(plan.encoder, plan.data.shape)
    return max(widths.items(), key=lambda item: item[1])


def file_bytes(plan: Plan) -> dict[str, int]:
    """Return the most bytes of each file of the plan, by path; a network of timm may be as large as it is listed."""
    values = prod(plan.expert_shape)
    features = plan.encoder.dim
    rank = plan.sketch.rank
    num_groups = plan.statistics.counts.num_groups
    sketch_values = (1 + rank) * values + 1 + num_groups * (1 + rank + rank**2)
    sizes = {
        plan.clustering.path: plan.clustering.num_fine
        * (FLOAT_BYTES * features + 2 * _INTEGER_BYTES),
        plan.sketch.path: FLOAT_BYTES * sketch_values,
    }
    if isinstance(plan.encoder, PcaEncoderSpec):
        sizes[plan.encoder.path] = FLOAT_BYTES * (1 + features) * plan.data.dim
    elif isinstance(plan.encoder, HogEncoderSpec):
        sizes[plan.encoder.path] = FLOAT_BYTES * (1 + features) * plan.encoder.values
    else:
        sizes[plan.encoder.path] = plan.file(plan.encoder.path).bytes
    if isinstance(plan.latent, Autoencoder):
        weights = autoencoder_size(plan.latent, plan.data.shape).bytes
        sizes[plan.latent.path] = weights if _in_float32(plan.latent) else weights // 2
    if plan.expert.base is not None:
        sizes[plan.expert.base] = expert_size(plan).bytes

    file_sizes = {path: size + HEADER_BYTES for path, size in sizes.items()}
    return file_sizes | dict.fromkeys(plan.earlier_plans, MAX_DOCUMENT_BYTES)


def inspection_bytes(plan: Plan) -> int:
    """Return the bytes of opening and checking a plan's files; its public expert is only checked, block by block."""
    sizes = file_bytes(plan)
    total = sum(size for path, size in sizes.items() if path != plan.expert.base)
    if isinstance(plan.encoder, TimmEncoderSpec):
        # The network's own weights, and its state beside the loaded ones.
        total += 2 * sizes[plan.encoder.path]
    if isinstance(plan.latent, Autoencoder) and not _in_float32(plan.latent):
        # Beside the file, what it becomes in float32.
        total += autoencoder_size(plan.latent, plan.data.shape).bytes
    # Checked in double precision: the rows of the sketch's basis, and the eigenvalues of its covariances.
    basis = plan.sketch.rank * prod(plan.expert_shape)
    covariances = plan.statistics.counts.num_groups * plan.sketch.rank**2
    return total + _DOUBLE_BYTES * (basis + 4 * covariances)


def encoding_bytes(plan: Plan) -> int:
    """Return the bytes of encoding one block of images: features, and latents where there are any."""
    match plan.encoder:
        case HogEncoderSpec():
            gradients = _HOG_COPIES * max(_HOG_VALUES, plan.data.dim)
            features = gradients + 3 * _PCA_BATCH * plan.encoder.values
        case TimmEncoderSpec():
            features = 4 * _TIMM_BATCH * _timm_values(plan.encoder, plan.data.shape)
        case _:
            features = 3 * _PCA_BATCH * plan.data.dim
    return max(FLOAT_BYTES * features, _autoencoder_bytes(plan.latent, plan.data.shape))


def picture_bytes(plan: Plan) -> int:
    """Return the bytes of the samples that one picture becomes, all of its slices; a picture has a bound of its own."""
    num_samples = 1
    if plan.transform and plan.transform.slices:
        num_samples = plan.transform.slices.count
    return FLOAT_BYTES * plan.data.dim * num_samples


def training_bytes(plan: Plan, parts: int = 1) -> int:
    """Return the bytes of one training step of an expert, weights and optimiser included.

    Args:
        plan: the plan.
        parts: the parts into which a machine divides a batch.
    """
    expert = plan.expert
    size = expert_size(plan)
    added = num_added_parameters(
        expert.adaptation, expert.architecture, plan.expert_shape, plan.condition
    )
    # The factors of a low-rank adaptation are trained beside the frozen weights.
    factors = NetworkSize(parameters=added, buffers=0, activations=Activations(0, 0, 0))
    batch = ceil(expert.training.batch_size / parts)
    if expert.privacy:
        # A unit is computed as a whole; the audit's trainings divide their batches.
        batch = max(batch, expert.privacy.images_per_unit * expert.privacy.draws)
    total = size.training_bytes(batch) + factors.training_bytes(0)
    if expert.training.ema_snapshots:
        total += _SNAPSHOT_COPIES * size.bytes
    if expert.privacy:
        trained = factors if added else size
        total += _PRIVATE_COPIES * trained.bytes
    return total


def router_bytes(plan: Plan, num_experts: int) -> int:
    """Return the bytes of a release's router and of the tensors beside it, as they are computed with."""
    num_groups = plan.statistics.counts.num_groups
    rank = plan.sketch.rank
    shares = num_experts * num_groups
    # Shares and their errors, stored and in double precision, and the groups' Gaussians turned to their axes.
    total = (2 * FLOAT_BYTES + 4 * _DOUBLE_BYTES) * shares
    total += 4 * _DOUBLE_BYTES * num_groups * (1 + rank + rank**2)
    class_counts = plan.statistics.class_counts
    if class_counts:
        # Noised and expected counts, their deviations, and the shares made of them.
        cells = class_counts.num_classes * (shares + num_experts)
        total += (_INTEGER_BYTES + 6 * _DOUBLE_BYTES) * cells
        # A block of the counts that the noise leaves possible (`ddm.routers.counts.likely_counts`), at least one cell.
        unit = plan.statistics.unit
        max_units = max(agreed.units(unit) for agreed in plan.agreed.values())
        reach_of_noise = 2 * _NOISE_REACH / class_counts.epsilon
        num_possible = ceil(min(reach_of_noise, max_units)) + 3
        total += 8 * _DOUBLE_BYTES * max(_ROUTED_VALUES, num_possible)
    if isinstance(plan.router, LearnedSettings):
        num_weights = perceptron_parameters(
            rank + _TIME_FEATURES, plan.router.hidden, plan.router.depth, num_experts
        )
        total += 2 * FLOAT_BYTES * num_weights
    if isinstance(plan.router, SamplesSettings):
        size = _token_router_size(plan, plan.router, num_experts)
        total += 2 * size.bytes + size.forward_bytes(0)
    return total


def _token_router_size(plan: Plan, router: SamplesSettings, num_experts: int) -> NetworkSize:
    return token_router_size(router, plan.expert_shape, num_experts, plan.condition)


def opening_bytes(plan: Plan, num_experts: int) -> int:
    """Return the bytes of opening a release: the plan's files, the router, and the experts' positions, not weights."""
    size = expert_size(plan)
    positions = num_experts * FLOAT_BYTES * size.buffers + size.forward_bytes(0)
    return inspection_bytes(plan) + router_bytes(plan, num_experts) + positions


def sampling_bytes(plan: Plan, num_experts: int, num: int, batch: int, steps: int) -> int:
    """Return the bytes of drawing samples, beyond those of opening the release and of the experts' weights.

    Args:
        plan: the plan.
        num_experts: the number of experts of the release.
        num: how many samples.
        batch: most samples that an expert is given at once.
        steps: the number of steps of the solver.
    """
    num_groups = plan.statistics.counts.num_groups
    in_flight = _num_in_flight(prod(plan.expert_shape), num, batch, steps)
    total = drawing_bytes(
        expert_size(plan), plan.latent, plan.data.shape, num=num, batch=batch, steps=steps
    )
    if isinstance(plan.router, SamplesSettings):
        size = _token_router_size(plan, plan.router, num_experts)
        total += FLOAT_BYTES * in_flight * size.activations.forward
    # The log densities of every group; in between, and for every expert, blocks of bounded size.
    log_densities = in_flight * (2 * num_groups + 4 * num_experts) + 8 * _ROUTED_VALUES
    total += _DOUBLE_BYTES * log_densities
    return total + 4 * _DOUBLE_BYTES * num_groups * (plan.sketch.rank + num_experts)


def drawing_bytes(
    network: NetworkSize,
    latent: LatentSpec,
    shape: tuple[int, ...],
    *,
    num: int,
    batch: int,
    steps: int,
) -> int:
    """Return the bytes of drawing samples from networks of one size, without their weights and without a router.

    Args:
        network: the size of each.
        latent: decodes samples into images.
        shape: the shape of an image.
        num: how many samples.
        batch: most samples that a network is given at once.
        steps: the number of steps of the solver.
    """
    values = prod(latent.shape(shape))
    evaluated = network.forward_bytes(min(num, batch)) - network.forward_bytes(0)
    bytes_per_sample = _SOLVER_COPIES * FLOAT_BYTES * values + 2 * _DOUBLE_BYTES * steps
    integrated = _num_in_flight(values, num, batch, steps) * bytes_per_sample
    followed = min(num * steps * _FOLLOWED_BYTES, _MAX_FOLLOWED_BYTES)
    # All samples, their images, and the images as bytes and as the file that is written.
    results = num * FLOAT_BYTES * (2 * values + 4 * prod(shape))
    return evaluated + integrated + followed + results + _autoencoder_bytes(latent, shape)


def _num_in_flight(values: int, num: int, batch: int, steps: int) -> int:
    """Return how many samples are integrated together."""
    bytes_per_sample = FLOAT_BYTES * values + _DOUBLE_BYTES * steps
    return min(num, max(batch, _IN_FLIGHT_BYTES // bytes_per_sample))


def condition_bytes(condition: Condition) -> int:
    """Return the bytes of opening the text encoder that a plan pins, and of one block of embeddings."""
    if not isinstance(condition, TextCondition) or condition.encoder is None:
        return 0
    weights = sum(file.bytes for file in condition.encoder.files)
    embeddings = 24 * FLOAT_BYTES * _TIMM_BATCH * condition.max_tokens * condition.dim
    return 2 * weights + embeddings


def labels_bytes(condition: Condition, num: int) -> int:
    """Return the bytes of the conditions of this many samples."""
    match condition:
        case ClassCondition():
            return _INTEGER_BYTES * num
        case TextCondition(dim=dim, max_tokens=max_tokens):
            return FLOAT_BYTES * num * dim * max_tokens
    return 0


def _autoencoder_bytes(latent: LatentSpec, shape: tuple[int, ...]) -> int:
    """Return the bytes of one block of samples that an autoencoder encodes or decodes."""
    if not isinstance(latent, Autoencoder):
        return 0
    first_layer = FLOAT_BYTES * latent.channels[0] * prod(latent.at_once(shape)[1:])
    block = max(1, min(_MAX_DECODED, _DECODED_BYTES // first_layer))
    values = autoencoder_size(latent, shape).activations.forward + _IMAGE_COPIES * prod(shape)
    return FLOAT_BYTES * block * values


def _in_float32(latent: Autoencoder) -> bool:
    """Whether an autoencoder's file holds the weights in float32, not in half of its bytes."""
    return not isinstance(latent, DiffusersKlLatent) or latent.dtype == "float32"


def _timm_values(encoder: TimmEncoderSpec, shape: tuple[int, ...]) -> int:
    """Return the values of one image in the largest step of a network of timm: resized, or in the network.

    An image that is much longer than wide is resized until its shorter side fits, before the centre is cut out.
    """
    # As timm resizes: the shorter side to the input's over the crop share.
    old_sides = shape[1:]
    scales = [
        side / encoder.crop / old for side, old in zip(encoder.image_size, old_sides, strict=True)
    ]
    scale = max(scales)
    num_pixels = prod(ceil(scale * old) for old in old_sides)
    resized = num_pixels * len(encoder.mean)
    in_network = prod(encoder.image_size) * (64 + encoder.dim // 8)
    return max(resized, in_network)
