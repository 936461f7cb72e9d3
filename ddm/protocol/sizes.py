"""Sizes of networks from the numbers of a document alone: nothing is built, and no torch is imported.

Counts of parameters are exact. Counts of activations are upper estimates: at least what one sample takes, and at most a
few times that. All counts are Python integers, which do not overflow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import assert_never

from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    Shape,
    TextCondition,
    TransformerSize,
    Unet,
)
from ddm.protocol.latent import AutoencoderSize, DiffusersKlLatent
from ddm.protocol.learning import Adaptation, LoraAdaptation

FLOAT_BYTES = 4
_TIME_FEATURES = 256
_MLP_RATIO = 4
_IN_TRAINING = 6  # copies of a weight: itself, its gradient, two moments, its average, and the average as it is written
# Activations of a transformer's block, in units of tokens x width: alive at once, and kept for the gradient.
_BLOCK_ALIVE, _BLOCK_KEPT, _READER_KEPT = 18, 26, 8
# of a residual block of convolutions, by channels in and out
_RESNET_ALIVE, _IN_KEPT, _OUT_KEPT = (
    6,
    4,
    6,
)
_ATTENTION_KEPT, _TRANSFORMER_KEPT = 10, 36


@dataclass(frozen=True)
class NetworkSize:
    """How large a network is.

    Attributes:
        parameters: trained numbers.
        widest: values of the widest layer's output for one sample; tokens x width of a transformer.
        alive: values that a forward pass of one sample has in memory at once.
        kept: values that a training step keeps of one sample for the gradient.
        buffers: values that are computed when it is built, such as positions.
    """

    parameters: int
    widest: int
    alive: int
    kept: int
    buffers: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return FLOAT_BYTES * self.parameters

    def forward_bytes(self, batch: int) -> int:
        """Return the bytes of a forward pass of so many samples, without the weights."""
        return FLOAT_BYTES * (3 * self.buffers + batch * self.alive)

    def training_bytes(self, batch: int) -> int:
        """Return the bytes of a training step on so many samples, weights and optimiser included."""
        copies = _IN_TRAINING * self.parameters
        return FLOAT_BYTES * (copies + 3 * self.buffers + batch * (self.kept + self.alive))


def network_size(
    architecture: Architecture, shape: Shape, condition: Condition = NoCondition()
) -> NetworkSize:
    """Return the size of an expert; the architecture must fit the shape and the condition.

    Args:
        architecture: what a plan names.
        shape: one sample in the experts' space.
        condition: the kind of condition that it takes.
    """
    match architecture:
        case Dit():
            return _dit(architecture, shape, condition)
        case Mmdit():
            return _mmdit(architecture, shape, condition)
        case Unet():
            return _unet(architecture, shape, condition)
        case _:
            assert_never(architecture)


def token_router_size(
    sizes: TransformerSize, shape: Shape, num_experts: int, condition: Condition = NoCondition()
) -> NetworkSize:
    """Return the size of the samples router, a transformer with a class token, which may read a condition."""
    size = _dit(sizes, shape, condition)
    hidden, pixels = sizes.hidden, shape[0] * sizes.patch**2
    answers = 1 if isinstance(condition, NoCondition) else 2
    parameters = (
        size.parameters - _linear(hidden, pixels) + answers * _linear(hidden, num_experts) + hidden
    )
    return NetworkSize(
        parameters, size.widest + hidden, 2 * size.alive, 2 * size.kept, size.buffers
    )


def perceptron_parameters(inputs: int, hidden: int, depth: int, outputs: int) -> int:
    """Return the parameters of a perceptron with `depth` hidden layers."""
    widths = [inputs, *[hidden] * depth, outputs]
    return sum(_linear(*pair) for pair in pairwise(widths))


def lora_parameters(
    adaptation: Adaptation, architecture: Architecture, shape: Shape, condition: Condition
) -> int:
    """Return the numbers that a low-rank adaptation adds: at most both factors of each of its linear layers."""
    if not isinstance(adaptation, LoraAdaptation):
        return 0
    return adaptation.rank * sum(
        num_in + num_out for num_in, num_out in _linears(architecture, shape, condition)
    )


def autoencoder_size(size: AutoencoderSize | DiffusersKlLatent, shape: Shape) -> NetworkSize:
    """Return the size of a latent's autoencoder; its activations are those of decoding one sample, or one tile."""
    if isinstance(size, DiffusersKlLatent):
        return _diffusers_autoencoder(size, size.at_once(shape))
    dims, sides, latent = (
        len(shape) - 1,
        [_voxels(shape, level) for level in range(size.levels)],
        size.latent_channels,
    )
    first, last = size.channels[0], size.channels[-1]
    # At the innermost level, if the last level has attention: two residual blocks with attention between them.
    middle = 2 * _resnet(dims, last, last) + _attention(last) if size.attention[-1] else 0
    encoder = _conv(dims, shape[0], first) + middle + 2 * last + _conv(dims, last, latent)
    decoder = _conv(dims, latent, last) + middle + 2 * first + _conv(dims, first, shape[0])
    for channels, end in ((size.channels, False), (size.channels[::-1], True)):
        attends = size.attention[::-1] if end else size.attention
        total, before = 0, channels[0]
        for level, width in enumerate(channels):
            total += _resnet(dims, before, width) + (size.num_res_blocks - 1) * _resnet(
                dims, width, width
            )
            total += size.num_res_blocks * _attention(width) if attends[level] else 0
            total += _conv(dims, width, width) if level + 1 < size.levels else 0
            before = width
        encoder, decoder = (encoder, decoder + total) if end else (encoder + total, decoder)
    parameters, widest = (
        encoder + decoder + 3 * _conv(dims, latent, latent, kernel=1),
        _widest(size.channels, sides),
    )
    return NetworkSize(parameters, widest, _RESNET_ALIVE * widest, 0)


def _widest(channels: Sequence[int], sides: Sequence[int]) -> int:
    """Return the values of an autoencoder's widest layer; `sides` are the voxels of each level.

    The decoder doubles the sides before it narrows, so a level also has the width of the next one.
    """
    above = [max(channels[level : level + 2]) for level in range(len(channels))]
    return max(width * side for width, side in zip(above, sides, strict=True))


def _diffusers_autoencoder(size: DiffusersKlLatent, shape: Shape) -> NetworkSize:
    first, last, latent, num = (
        size.channels[0],
        size.channels[-1],
        size.latent_channels,
        size.layers_per_block,
    )
    middle = 2 * _resnet(2, last, last) + (_attention(last) if size.mid_attention else 0)
    parameters = 2 * middle + 2 * last + _conv(2, shape[0], first) + _conv(2, last, 2 * latent)
    parameters += 2 * first + _conv(2, latent, last) + _conv(2, first, shape[0])
    parameters += _conv(2, 2 * latent, 2 * latent, kernel=1) if size.quant_conv else 0
    parameters += _conv(2, latent, latent, kernel=1) if size.post_quant_conv else 0
    for channels, layers in ((size.channels, num), (size.channels[::-1], num + 1)):
        before = channels[0]
        for level, width in enumerate(channels):
            parameters += _resnet(2, before, width) + (layers - 1) * _resnet(2, width, width)
            parameters += _conv(2, width, width) if level + 1 < size.levels else 0
            before = width
    widest = _widest(size.channels, [_voxels(shape, level) for level in range(size.levels)])
    return NetworkSize(parameters, widest, _RESNET_ALIVE * widest, 0)


def _linear(num_in: int, num_out: int) -> int:
    return num_in * num_out + num_out


def _conv(dims: int, num_in: int, num_out: int, kernel: int = 3) -> int:
    return num_in * num_out * int(kernel**dims) + num_out


def _voxels(shape: Shape, level: int) -> int:
    return prod(side // 2**level for side in shape[1:])


def _tokens(architecture: TransformerSize, shape: Shape) -> int:
    return prod(side // architecture.patch for side in shape[1:])


def _condition_linears(condition: Condition, hidden: int) -> list[tuple[int, int]]:
    return (
        [(condition.dim, hidden), (hidden, hidden)] if isinstance(condition, TextCondition) else []
    )


def _condition_parameters(condition: Condition, hidden: int) -> int:
    """Return the numbers beside linear layers with which a transformer reads its condition."""
    if isinstance(condition, ClassCondition):
        return (1 + condition.num_classes) * hidden
    return hidden if isinstance(condition, TextCondition) else 0


def _linears(
    architecture: Architecture, shape: Shape, condition: Condition
) -> list[tuple[int, int]]:
    """Return inputs and outputs of each linear layer, those that a low-rank adaptation widens."""
    match architecture:
        case Mmdit():
            return _mmdit_linears(architecture, shape, condition)
        case Dit():
            return _dit_linears(architecture, shape, condition)
        case Unet():
            return _unet_linears(architecture, shape, condition)


def _dit_linears(
    sizes: TransformerSize, shape: Shape, condition: Condition
) -> list[tuple[int, int]]:
    hidden, pixels = sizes.hidden, shape[0] * sizes.patch**2
    block = [
        (hidden, 3 * hidden),
        (hidden, hidden),
        (hidden, _MLP_RATIO * hidden),
        (_MLP_RATIO * hidden, hidden),
    ]
    if isinstance(condition, TextCondition):
        block += [(hidden, hidden), (hidden, 2 * hidden), (hidden, hidden)]
    modulation = (hidden, (6 * sizes.depth + 2) * hidden)
    outside = [
        (pixels, hidden),
        (_TIME_FEATURES, hidden),
        (hidden, hidden),
        modulation,
        (hidden, pixels),
    ]
    return [*outside, *sizes.depth * block, *_condition_linears(condition, hidden)]


def _dit(sizes: TransformerSize, shape: Shape, condition: Condition) -> NetworkSize:
    hidden, tokens = sizes.hidden, _tokens(sizes, shape)
    normalised = isinstance(sizes, Dit) and sizes.qk_norm
    norms = 2 * sizes.depth * (hidden // sizes.heads) if normalised else 0
    parameters = sum(_linear(*pair) for pair in _dit_linears(sizes, shape, condition)) + norms
    text = condition.max_tokens if isinstance(condition, TextCondition) else 0
    widest, modulation = tokens * hidden, (6 * sizes.depth + 2) * hidden
    block = (_BLOCK_KEPT + 4 * normalised) * widest + (
        (_READER_KEPT * widest + 3 * text * hidden) if text else 0
    )
    outside = _outside(shape, condition) + 2 * modulation + 3 * text * hidden
    return NetworkSize(
        parameters=parameters + _condition_parameters(condition, hidden),
        widest=widest,
        alive=_BLOCK_ALIVE * (widest + text * hidden) + outside,
        kept=sizes.depth * block + 6 * widest + outside,
        buffers=tokens * hidden,
    )


def _outside(shape: Shape, condition: Condition) -> int:
    """Return the values of a sample, its condition, and what is computed from them around the network."""
    text = condition.max_tokens * condition.dim if isinstance(condition, TextCondition) else 0
    return 8 * prod(shape) + 2 * text


def _mmdit_widths(sizes: Mmdit) -> tuple[list[bool], list[int]]:
    """Return whether the text answers in each joint block, and the widths of the modulations in units of hidden."""
    answers = [block + 1 < sizes.depth for block in range(sizes.depth - sizes.shared_depth)]
    return answers, [*(12 if each else 8 for each in answers), *[3] * sizes.shared_depth, 2]


def _mmdit_linears(sizes: Mmdit, shape: Shape, condition: Condition) -> list[tuple[int, int]]:
    hidden, pixels = sizes.hidden, shape[0] * sizes.patch**2
    answers, widths = _mmdit_widths(sizes)
    stream = [
        (hidden, 3 * hidden),
        (hidden, hidden),
        (hidden, _MLP_RATIO * hidden),
        (_MLP_RATIO * hidden, hidden),
    ]
    joint = [
        pair
        for each in answers
        for pair in (*stream, *(stream if each else [(hidden, 2 * hidden)]))
    ]
    shared = [(hidden, (3 + _MLP_RATIO) * hidden), ((1 + _MLP_RATIO) * hidden, hidden)]
    outside = [
        (pixels, hidden),
        (_TIME_FEATURES, hidden),
        (hidden, hidden),
        (hidden, hidden),
        (hidden, pixels),
    ]
    modulation = (hidden, sum(widths) * hidden)
    return [
        *outside,
        modulation,
        *joint,
        *sizes.shared_depth * shared,
        *_condition_linears(condition, hidden),
    ]


def _mmdit(sizes: Mmdit, shape: Shape, condition: Condition) -> NetworkSize:
    hidden, head = sizes.hidden, sizes.hidden // sizes.heads
    answers, widths = _mmdit_widths(sizes)
    norms = head * (sum(4 if each else 3 for each in answers) + 2 * sizes.shared_depth)
    parameters = sum(_linear(*pair) for pair in _mmdit_linears(sizes, shape, condition)) + norms
    text = condition.max_tokens if isinstance(condition, TextCondition) else 0
    widest = (_tokens(sizes, shape) + text) * hidden
    outside = _outside(shape, condition) + 2 * sum(widths) * hidden
    return NetworkSize(
        parameters=parameters + _condition_parameters(condition, hidden),
        widest=widest,
        alive=2 * _BLOCK_ALIVE * widest + outside,
        kept=sizes.depth * (_BLOCK_KEPT + 8) * widest + 8 * widest + outside,
        buffers=_tokens(sizes, shape) * hidden,
    )


@dataclass(frozen=True)
class _Level:
    """The residual blocks of one level of a U-Net, on the way down or up.

    Attributes:
        resnets: channels in and out of each.
        attends: whether attention follows each.
        resamples: whether a convolution halves or doubles the sides at the end.
        level: 0 has the sample's own sides.
    """

    resnets: tuple[tuple[int, int], ...]
    attends: bool
    resamples: bool
    level: int


def _levels(unet: Unet) -> list[_Level]:
    channels, num, last = unet.channels, unet.num_res_blocks, len(unet.channels) - 1
    found, before = [], channels[0]
    for level, width in enumerate(channels):
        resnets = ((before, width), *[(width, width)] * (num - 1))
        found.append(_Level(resnets, unet.attention[level], level < last, level))
        before = width
    # the middle; its attention is apart
    found.append(_Level(((channels[-1], channels[-1]),) * 2, False, False, last))
    for level in range(last, -1, -1):
        width, skip = channels[level], channels[max(level - 1, 0)]
        wides = [before, *[width] * num]
        skips = [*[width] * num, skip]
        resnets = tuple((wide + other, width) for wide, other in zip(wides, skips, strict=True))
        found.append(_Level(resnets, unet.attention[level], level > 0, level))
        before = width
    return found


def _resnet(dims: int, num_in: int, num_out: int) -> int:
    """Return the parameters of a residual block of two convolutions, without a time."""
    skip = _conv(dims, num_in, num_out, kernel=1) if num_in != num_out else 0
    return (
        2 * num_in
        + _conv(dims, num_in, num_out)
        + 2 * num_out
        + _conv(dims, num_out, num_out)
        + skip
    )


def _attention(width: int) -> int:
    return 2 * width + 4 * _linear(width, width)


def _transformer(width: int, text: int) -> int:
    """Return the parameters of a block of self-attention, cross-attention and network between two projections."""
    attention = (
        3 * width**2 + _linear(width, width) + width**2 + 2 * text * width + _linear(width, width)
    )
    network = _linear(width, 8 * width) + _linear(4 * width, width)
    return 2 * width + 2 * _linear(width, width) + attention + network + 6 * width


def _unet(unet: Unet, shape: Shape, condition: Condition) -> NetworkSize:
    dims, first, last, time = (
        len(shape) - 1,
        unet.channels[0],
        unet.channels[-1],
        4 * unet.channels[0],
    )
    text = condition.dim if isinstance(condition, TextCondition) else 0
    num_text = condition.max_tokens if isinstance(condition, TextCondition) else 0

    def attention(width: int) -> int:
        return _transformer(width, text) if text else _attention(width)

    parameters = (
        _conv(dims, shape[0], first) + _linear(first, time) + _linear(time, time) + attention(last)
    )
    parameters += 2 * first + _conv(dims, first, shape[0])
    if isinstance(condition, ClassCondition):
        parameters += (1 + condition.num_classes) * time
    kept, widest, skips = 0, first * _voxels(shape, 0), first * _voxels(shape, 0)
    by_attention = _TRANSFORMER_KEPT if text else _ATTENTION_KEPT
    for level in _levels(unet):
        voxels = _voxels(shape, level.level)
        for num_in, num_out in level.resnets:
            parameters += _resnet(dims, num_in, num_out) + _linear(time, num_out)
            parameters += attention(num_out) if level.attends else 0
            kept += voxels * (_IN_KEPT * num_in + _OUT_KEPT * num_out)
            kept += (by_attention * voxels + 4 * num_text) * num_out if level.attends else 0
            widest = max(widest, voxels * max(num_in, num_out))
            skips += voxels * num_out
        if level.resamples:
            width = level.resnets[-1][1]
            parameters += _conv(dims, width, width)
            # On the way up it reads twice the sides; the outputs of both ways are counted alike.
            kept += 2 * width * _voxels(shape, max(level.level - 1, 0))
            widest = max(widest, width * _voxels(shape, max(level.level - 1, 0)))
    alive = (
        skips + (3 * _RESNET_ALIVE if text else _RESNET_ALIVE) * widest + _outside(shape, condition)
    )
    kept += by_attention * last * _voxels(shape, len(unet.channels) - 1) + _outside(
        shape, condition
    )
    return NetworkSize(parameters + text, widest, alive, kept)


def _unet_linears(unet: Unet, shape: Shape, condition: Condition) -> list[tuple[int, int]]:
    time, text = 4 * unet.channels[0], condition.dim if isinstance(condition, TextCondition) else 0
    found = [(unet.channels[0], time), (time, time), *_attention_linears(unet.channels[-1], text)]
    for level in _levels(unet):
        for _, width in level.resnets:
            found += [(time, width), *(_attention_linears(width, text) if level.attends else ())]
    return found


def _attention_linears(width: int, text: int) -> Sequence[tuple[int, int]]:
    if not text:
        return 4 * [(width, width)]
    return [*6 * [(width, width)], *2 * [(text, width)], (width, 8 * width), (4 * width, width)]
