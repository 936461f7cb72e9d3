"""What a plan takes in bytes, from its numbers alone: each of its files, a look at it, training, sampling.

A site refuses by these figures before it opens a file, and a researcher's commands before they load one. They are upper
estimates for float32 on a CPU; nothing here reads a file, builds a network, or imports torch.
"""

from math import ceil, prod

from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.protocol.base import MAX_DOCUMENT_BYTES
from ddm.protocol.encoder import HogEncoder, PcaEncoder, TimmEncoder
from ddm.protocol.latent import Autoencoder, DiffusersKlLatent, Latent
from ddm.protocol.plan import Plan
from ddm.protocol.routers import LearnedRouter, SamplesRouter
from ddm.protocol.sizes import (
    FLOAT_BYTES,
    NetworkSize,
    autoencoder_size,
    lora_parameters,
    network_size,
    perceptron_parameters,
    token_router_size,
)

HEADER_BYTES = 1 << 20  # the largest header of a file of tensors
_INTEGER_BYTES = _DOUBLE_BYTES = 8
_ENCODED_AT_ONCE = 64  # images that a network of timm gets at once
_PCA_AT_ONCE = 1024
# of images whose gradients are looked at at once; of each value meanwhile
_HOG_VALUES, _HOG_COPIES = (
    1 << 20,
    32,
)
_PRIVATE_COPIES = 8  # of a weight, in private training: three sums in double precision, a gradient as it is and clipped
_TIME_FEATURES = 4  # of the learned router
_IMAGES_ALIVE = 8  # images beside each that is encoded or decoded: itself, its tiles, which overlap, and its copies
# of the widest layer of an autoencoder; samples at once
_DECODED_BYTES, _MOST_DECODED = (
    1 << 26,
    64,
)
_IN_FLIGHT_BYTES = 1 << 26
_SOLVER_COPIES = (
    20  # states, memories, velocities and guesses of the samples that are integrated together
)
# of the table of experts that samples followed, and its copies
_FOLLOWED_BYTES, _MOST_FOLLOWED_BYTES = (
    96,
    3 << 24,
)
_NOISE_REACH = 80  # of a count, times epsilon; noise beyond it is negligible
_ROUTED_AT_ONCE = 1 << 19  # values in one block of the log densities of samples, experts and groups


def expert_size(plan: Plan) -> NetworkSize:
    """Return the size of one expert."""
    return network_size(plan.expert.architecture, plan.expert_shape, plan.condition)


def widest_layer(plan: Plan) -> tuple[str, int]:
    """Return which network has the layer with the most values for one sample, and their number."""
    found = {f"expert ({plan.expert.architecture.kind})": expert_size(plan).widest}
    if isinstance(plan.latent, Autoencoder):
        found["autoencoder"] = autoencoder_size(plan.latent, plan.data.shape).widest
    if isinstance(plan.router, SamplesRouter):
        found["router (samples)"] = _token_router(plan, plan.router, 1).widest
    if isinstance(plan.encoder, TimmEncoder):
        found["encoder (timm)"] = _timm_values(plan.encoder, plan.data.shape)
    name = max(found, key=lambda name: found[name])
    return name, found[name]


def file_bytes(plan: Plan) -> dict[str, int]:
    """Return the most bytes of each file of the plan, by path; a network of timm may be as large as it is listed."""
    dim, values = plan.data.dim, prod(plan.expert_shape)
    features, num_fine = plan.encoder.dim, plan.clustering.num_fine
    rank, num_groups = plan.sketch.rank, plan.statistics.counts.num_groups
    sizes = {
        plan.clustering.path: num_fine * (FLOAT_BYTES * features + 2 * _INTEGER_BYTES),
        plan.sketch.path: FLOAT_BYTES
        * ((1 + rank) * values + 1 + num_groups * (1 + rank + rank**2)),
    }
    if isinstance(plan.encoder, PcaEncoder):
        sizes[plan.encoder.path] = FLOAT_BYTES * (1 + features) * dim
    elif isinstance(plan.encoder, HogEncoder):
        sizes[plan.encoder.path] = FLOAT_BYTES * (1 + features) * plan.encoder.values
    else:
        sizes[plan.encoder.path] = plan.file(plan.encoder.path).bytes
    if isinstance(plan.latent, Autoencoder):
        weights = autoencoder_size(plan.latent, plan.data.shape).bytes
        sizes[plan.latent.path] = weights if _in_float32(plan.latent) else weights // 2
    if plan.expert.base is not None:
        sizes[plan.expert.base] = expert_size(plan).bytes
    documents = dict.fromkeys(plan.earlier_plans, MAX_DOCUMENT_BYTES)
    return {path: size + HEADER_BYTES for path, size in sizes.items()} | documents


def looking_bytes(plan: Plan) -> int:
    """Return the bytes of opening and checking a plan's files; its public expert is only checked, block by block."""
    sizes = file_bytes(plan)
    opened = sum(size for path, size in sizes.items() if path != plan.expert.base)
    if isinstance(plan.encoder, TimmEncoder):
        # the network's own weights, and its state beside the loaded ones
        opened += 2 * sizes[plan.encoder.path]
    if isinstance(plan.latent, Autoencoder) and not _in_float32(plan.latent):
        # beside the file, what it becomes in float32
        opened += autoencoder_size(plan.latent, plan.data.shape).bytes
    # Checked in double precision: the rows of the sketch's basis, and the eigenvalues of its covariances.
    covariances = plan.statistics.counts.num_groups * plan.sketch.rank**2
    return opened + _DOUBLE_BYTES * (plan.sketch.rank * prod(plan.expert_shape) + 4 * covariances)


def encoding_bytes(plan: Plan) -> int:
    """Return the bytes of encoding one block of images: features, and latents where there are any."""
    found = 3 * FLOAT_BYTES * _PCA_AT_ONCE * plan.data.dim
    if isinstance(plan.encoder, HogEncoder):
        found = FLOAT_BYTES * (
            _HOG_COPIES * max(_HOG_VALUES, plan.data.dim) + 3 * _PCA_AT_ONCE * plan.encoder.values
        )
    elif isinstance(plan.encoder, TimmEncoder):
        found = 4 * FLOAT_BYTES * _ENCODED_AT_ONCE * _timm_values(plan.encoder, plan.data.shape)
    return max(found, _autoencoder_bytes(plan.latent, plan.data.shape))


def picture_bytes(plan: Plan) -> int:
    """Return the bytes of the samples that one picture becomes, all of its slices; a picture has a bound of its own."""
    slices = plan.transform.slices if plan.transform else None
    return FLOAT_BYTES * plan.data.dim * (slices.count if slices else 1)


def training_bytes(plan: Plan, parts: int = 1) -> int:
    """Return the bytes of one training step of an expert, weights and optimiser included.

    Args:
        plan: the plan.
        parts: into which a machine divides a batch.
    """
    batch, shape = ceil(plan.expert.training.batch_size / parts), plan.expert_shape
    factors = lora_parameters(
        plan.expert.adaptation, plan.expert.architecture, shape, plan.condition
    )
    size = expert_size(plan)
    # two more, and both as they are written
    averages = 4 if plan.expert.training.ema_snapshots else 0
    kept = averages * FLOAT_BYTES * size.parameters
    if plan.expert.privacy:
        kept += _PRIVATE_COPIES * FLOAT_BYTES * (factors or size.parameters)
    return size.training_bytes(batch) + NetworkSize(factors, 0, 0, 0).training_bytes(0) + kept


def router_bytes(plan: Plan, num_experts: int) -> int:
    """Return the bytes of a release's router and of the tensors beside it, as they are computed with."""
    num_groups, rank = plan.statistics.counts.num_groups, plan.sketch.rank
    shares = num_experts * num_groups
    # Shares and their errors, stored and in double precision, and the groups' Gaussians turned to their axes.
    found = (2 * FLOAT_BYTES + 4 * _DOUBLE_BYTES) * shares + 4 * _DOUBLE_BYTES * num_groups * (
        1 + rank + rank**2
    )
    if terms := plan.statistics.class_counts:
        # Noised and expected counts, their deviations, and the shares made of them; and a block of the counts that the
        # noise leaves possible, of which one cell at least is looked at (`ddm.routers.counts.likely_counts`).
        found += (_INTEGER_BYTES + 6 * _DOUBLE_BYTES) * terms.num_classes * (shares + num_experts)
        most = max(agreed.units(plan.statistics.unit) for agreed in plan.agreed.values())
        found += (
            8
            * _DOUBLE_BYTES
            * max(_ROUTED_AT_ONCE, ceil(min(2 * _NOISE_REACH / terms.epsilon, most)) + 3)
        )
    if isinstance(plan.router, LearnedRouter):
        sizes = (rank + _TIME_FEATURES, plan.router.hidden, plan.router.depth, num_experts)
        found += 2 * FLOAT_BYTES * perceptron_parameters(*sizes)
    if isinstance(plan.router, SamplesRouter):
        size = _token_router(plan, plan.router, num_experts)
        found += 2 * size.bytes + 3 * FLOAT_BYTES * size.buffers
    return found


def _token_router(plan: Plan, router: SamplesRouter, num_experts: int) -> NetworkSize:
    return token_router_size(router, plan.expert_shape, num_experts, router.told(plan.condition))


def opening_bytes(plan: Plan, num_experts: int) -> int:
    """Return the bytes of opening a release: the plan's files, the router, and the experts' positions, not weights."""
    positions = 3 * FLOAT_BYTES * expert_size(plan).buffers
    return (
        looking_bytes(plan)
        + router_bytes(plan, num_experts)
        + num_experts * positions // 3
        + positions
    )


def sampling_bytes(plan: Plan, num_experts: int, num: int, batch: int, steps: int) -> int:
    """Return the bytes of drawing samples, beyond those of opening the release and of the experts' weights.

    Args:
        plan: the plan.
        num_experts: of the release.
        num: how many samples.
        batch: most samples that an expert is given at once.
        steps: of the solver.
    """
    num_groups, at_once = (
        plan.statistics.counts.num_groups,
        _at_once(prod(plan.expert_shape), num, batch, steps),
    )
    found = drawing_bytes(
        expert_size(plan), plan.latent, plan.data.shape, num=num, batch=batch, steps=steps
    )
    if isinstance(plan.router, SamplesRouter):
        found += FLOAT_BYTES * at_once * _token_router(plan, plan.router, num_experts).alive
    # The log densities of every group; in between, and for every expert, blocks of bounded size.
    found += _DOUBLE_BYTES * (at_once * (2 * num_groups + 4 * num_experts) + 8 * _ROUTED_AT_ONCE)
    found += 4 * _DOUBLE_BYTES * num_groups * (plan.sketch.rank + num_experts)
    return found


def drawing_bytes(
    network: NetworkSize,
    latent: Latent,
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
        shape: of an image.
        num: how many samples.
        batch: most samples that a network is given at once.
        steps: of the solver.
    """
    values, images = prod(latent.shape(shape)), prod(shape)
    found = network.forward_bytes(min(num, batch)) - network.forward_bytes(0)
    found += _at_once(values, num, batch, steps) * (
        _SOLVER_COPIES * FLOAT_BYTES * values + 2 * _DOUBLE_BYTES * steps
    )
    found += min(num * steps * _FOLLOWED_BYTES, _MOST_FOLLOWED_BYTES)
    # All samples, their images, and the images as bytes and as the file that is written.
    return found + num * FLOAT_BYTES * (2 * values + 4 * images) + _autoencoder_bytes(latent, shape)


def _at_once(values: int, num: int, batch: int, steps: int) -> int:
    """Return how many samples are integrated together."""
    return min(num, max(batch, _IN_FLIGHT_BYTES // (FLOAT_BYTES * values + _DOUBLE_BYTES * steps)))


def condition_bytes(condition: Condition) -> int:
    """Return the bytes of opening the text encoder that a plan pins, and of one block of embeddings."""
    if not isinstance(condition, TextCondition) or condition.encoder is None:
        return 0
    weights = sum(file.bytes for file in condition.encoder.files)
    return 2 * weights + 24 * FLOAT_BYTES * _ENCODED_AT_ONCE * condition.max_tokens * condition.dim


def labels_bytes(condition: Condition, num: int) -> int:
    """Return the bytes of the conditions of so many samples."""
    match condition:
        case ClassCondition():
            return _INTEGER_BYTES * num
        case TextCondition(dim=dim, max_tokens=max_tokens):
            return FLOAT_BYTES * num * dim * max_tokens
    return 0


def _autoencoder_bytes(latent: Latent, shape: tuple[int, ...]) -> int:
    """Return the bytes of one block of samples that an autoencoder encodes or decodes."""
    if not isinstance(latent, Autoencoder):
        return 0
    first_layer = FLOAT_BYTES * latent.channels[0] * prod(latent.at_once(shape)[1:])
    block = max(1, min(_MOST_DECODED, _DECODED_BYTES // first_layer))
    return (
        FLOAT_BYTES * block * (autoencoder_size(latent, shape).alive + _IMAGES_ALIVE * prod(shape))
    )


def _in_float32(latent: Autoencoder) -> bool:
    """Whether an autoencoder's file holds the weights in float32, not in half of its bytes."""
    return not isinstance(latent, DiffusersKlLatent) or latent.dtype == "float32"


def _timm_values(encoder: TimmEncoder, shape: tuple[int, ...]) -> int:
    """Return the values of one image in the largest step of a network of timm: resized, or in the network.

    An image that is much longer than wide is resized until its shorter side fits, before the centre is cut out.
    """
    scale = max(
        side / encoder.crop / old for side, old in zip(encoder.image_size, shape[1:], strict=True)
    )
    resized = prod(ceil(scale * old) for old in shape[1:]) * len(encoder.mean)
    return max(resized, prod(encoder.image_size) * (64 + encoder.dim // 8))
