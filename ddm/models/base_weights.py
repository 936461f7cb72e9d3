"""Fits the weights of a base to the network of a plan: known adjustments, or a refusal that names the tensor.

A base may have been trained on samples of another size, with other classes, or with other channels. Where there is a
way to keep what it knows, its weights are adjusted; the docstrings state what the adjusted network answers. Positions
need no adjustment here: they are computed from a grid that the plan names (`ExpertArchitecture.spanning`).
"""

# Shape legend: K rows of a table of classes, D hidden width, C channels, P values of a patch in one channel, O outputs.
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from ddm.errors import TensorFileError
from ddm.io.tensors import spec_of
from ddm.models import MAX_WEIGHT, build_expert, expected_tensors
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    Shape,
    TextCondition,
    Unet,
)

# Names of received tensors are shown shortened and escaped.
_MAX_SHOWN = 80
_REMEDY = "Choose an architecture whose tensors are those of the base, or another base."


@dataclass(frozen=True)
class BaseWeights:
    """The weights of a base, by this toolkit's names.

    Attributes:
        tensors: float32.
        shape: the shape of a sample of the base, in its experts' space; None where nobody stated it.
        notes: what is not as it was already, in words.
    """

    tensors: Mapping[str, Tensor]
    shape: Shape | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FittedBase:
    """Weights that are exactly those of the plan's network.

    Attributes:
        tensors: float32.
        changes: what was changed, in words.
    """

    tensors: dict[str, Tensor]
    changes: tuple[str, ...]


@dataclass(frozen=True)
class _LayerNames:
    """The tensors of an architecture that depend on classes and channels.

    Attributes:
        classes: the table of classes, whose row 0 is that of no class.
        time_bias: the bias of the layer to whose output a class is added.
        inputs: the first layer's weight.
        outputs: the last layer's weight and bias.
    """

    classes: str
    time_bias: str
    inputs: str
    outputs: tuple[str, str]


_TRANSFORMER_NAMES = _LayerNames(
    classes="classes.table.weight",
    time_bias="time.mlp.2.bias",
    inputs="embed.weight",
    outputs=("head.weight", "head.bias"),
)
_UNET_NAMES = _LayerNames(
    classes="net.class_embedding.weight",
    time_bias="net.time_embed.2.bias",
    inputs="net.conv_in.conv.weight",
    outputs=("net.out.2.conv.weight", "net.out.2.conv.bias"),
)


def num_input_channels(tensors: Mapping[str, Tensor], architecture: Architecture) -> int | None:
    """Return the channels of a sample that the first layer reads; None where it is missing or divides otherwise.

    Args:
        tensors: the weights of a base, which need not fit.
        architecture: the architecture whose tensors they should be, with its side of a patch.
    """
    weight = tensors.get(_layer_names(architecture).inputs)
    if weight is None or weight.dim() < 2:
        return None
    values_of_channel = 1
    if not isinstance(architecture, Unet):
        values_of_channel = architecture.patch**2
    if weight.shape[1] % values_of_channel:
        return None
    return weight.shape[1] // values_of_channel


def fit_base(
    base: BaseWeights, architecture: Architecture, shape: Shape, condition: Condition
) -> FittedBase:
    """Return the base's weights as the plan's network has them.

    Args:
        base: the weights.
        architecture: the architecture of the plan's experts.
        shape: the shape of a sample, as the plan's experts see it.
        condition: the condition of the plan's experts.

    Raises:
        TensorFileError: a tensor does not fit, and there is no known way; it names the tensor.
        ShapeError, SetupError: the plan's network cannot be built.
    """
    tensors = dict(base.tensors)
    try:
        changes = [*base.notes, *_adjust(tensors, base.shape, architecture, shape, condition)]
    # torch's and Python's own errors where a tensor has another number of sides than such a layer has.
    except (RuntimeError, IndexError, TypeError) as error:
        raise TensorFileError(
            "base",
            expected=f"tensors with as many sides as those of the {architecture.kind}",
            got=" ".join(str(error).split())[:200],
            remedy=_REMEDY,
        ) from error
    _check(tensors, architecture, shape, condition)
    return FittedBase(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, tuple(changes)
    )


def _adjust(
    tensors: dict[str, Tensor],
    base_shape: Shape | None,
    architecture: Architecture,
    shape: Shape,
    condition: Condition,
) -> list[str]:
    """Adjust the tensors to the plan's classes, texts, channels and sizes; return what was changed, in words."""
    names = _layer_names(architecture)
    changes = [
        *_fit_classes(tensors, names, condition),
        *_add_text_layers(tensors, architecture, shape, condition),
    ]
    if base_shape is None:
        return changes
    changes += _fit_channels(tensors, names, base_shape, shape)
    if base_shape[1:] != shape[1:]:
        old_sides = " x ".join(map(str, base_shape[1:]))
        new_sides = " x ".join(map(str, shape[1:]))
        changes.append(f"samples of {new_sides} instead of {old_sides}")
    return changes


def _layer_names(architecture: Architecture) -> _LayerNames:
    match architecture:
        case Dit() | Mmdit():
            return _TRANSFORMER_NAMES
        case Unet():
            return _UNET_NAMES
        case _:
            assert_never(architecture)


def _fit_classes(tensors: dict[str, Tensor], names: _LayerNames, condition: Condition) -> list[str]:
    """Give the table of classes as many rows as the plan has classes, and one for none.

    - More classes: the new ones begin as the vector of no class, so that the base answers them as it answers none.
    - No table in the base: all rows are zero, so that it answers every class as it did.
    - No classes in the plan: the vector of no class is added to the time's bias, so that it answers as it did for none.

    Fewer classes are left to `_check`, which refuses them: nobody can tell which rows are meant.
    """
    table_KD = tensors.get(names.classes)
    if not isinstance(condition, ClassCondition):
        bias_D = tensors.get(names.time_bias)
        if table_KD is None or bias_D is None or table_KD.shape[1:] != bias_D.shape:
            return []
        tensors[names.time_bias] = bias_D + table_KD[0]
        del tensors[names.classes]
        return [f"its {len(table_KD) - 1} classes left out: it answers as for no class"]

    num_rows = 1 + condition.num_classes
    if table_KD is None:
        bias_D = tensors.get(names.time_bias)
        if bias_D is None:
            return []
        tensors[names.classes] = bias_D.new_zeros(num_rows, len(bias_D))
        return [f"{condition.num_classes} classes added, which it answers as it answered without"]
    num_new = num_rows - len(table_KD)
    if num_new <= 0:
        return []
    new_rows_KD = table_KD[:1].expand(num_new, -1)
    tensors[names.classes] = torch.cat([table_KD, new_rows_KD])
    return [f"{num_new} classes added to {len(table_KD) - 1}, which begin as no class"]


def _add_text_layers(
    tensors: dict[str, Tensor], architecture: Architecture, shape: Shape, condition: Condition
) -> list[str]:
    """Add what reads a text where the base lacks it, with the initial weights of a fresh network.

    In a `dit` the output of its cross-attention starts at zero, so that the base answers as it did without a text.
    """
    if not isinstance(condition, TextCondition) or isinstance(architecture, Unet):
        return []
    specs = expected_tensors(architecture, shape, condition)
    missing = [name for name in specs if name not in tensors and _reads_text(name)]
    if not missing:
        return []
    fresh = build_expert(architecture, shape, condition=condition, seed=0).state_dict()
    for name in missing:
        tensors[name] = fresh[name]
    return [f"{len(missing)} tensors that read a text added, with initial weights"]


def _reads_text(name: str) -> bool:
    # Of an MMDiT, the text's tokens as the first block gets them; of a DiT, its cross-attention too.
    return name.startswith(("text.", "pooled.")) or ".reader." in name


def _fit_channels(
    tensors: dict[str, Tensor], names: _LayerNames, base_shape: Shape, shape: Shape
) -> list[str]:
    """Make one channel of several, or several of one.

    - One of several: the network answers a grey sample as the base answers the same values in every channel, averaged.
    - Several of one: it answers in every channel as the base answers the mean of the channels.

    Other numbers of channels are left to `_check`, which refuses them.
    """
    old = base_shape[0]
    new = shape[0]
    weight = tensors.get(names.inputs)
    if old == new or 1 not in (old, new) or weight is None or weight.shape[1] % old:
        return []
    outputs = [tensors.get(name) for name in names.outputs]
    if any(output is None or len(output) % old for output in outputs):
        return []

    # Of a transformer, a patch's values follow one another within each channel; of a convolution each channel is one.
    by_channel = weight.reshape(len(weight), old, -1, *weight.shape[2:])
    if new == 1:
        fitted = by_channel.sum(1, keepdim=True)
    else:
        fitted = by_channel.expand(-1, new, *by_channel.shape[2:]) / new
    tensors[names.inputs] = fitted.flatten(1, 2)
    for name, output in zip(names.outputs, outputs, strict=True):
        if output is None:
            continue
        by_channel = output.reshape(old, -1, *output.shape[1:])
        if new == 1:
            fitted = by_channel.mean(0, keepdim=True)
        else:
            fitted = by_channel.expand(new, *by_channel.shape[1:])
        tensors[name] = fitted.flatten(0, 1)
    return [f"{new} channels instead of {old}"]


def _check(
    tensors: Mapping[str, Tensor], architecture: Architecture, shape: Shape, condition: Condition
) -> None:
    """Require exactly the tensors of the plan's network.

    Raises:
        TensorFileError: names the first tensor that is missing, unknown, of another shape, or with a value beyond
            `MAX_WEIGHT`.
    """
    specs = expected_tensors(architecture, shape, condition)
    for name, spec in specs.items():
        if name not in tensors:
            raise TensorFileError(
                f"base, tensor {name}", expected=str(spec), got="no such tensor", remedy=_REMEDY
            )
        spec_of_base = spec_of(tensors[name])
        if spec_of_base != spec:
            raise TensorFileError(
                f"base, tensor {name}",
                expected=f"{spec}, as the recipe's architecture, shape and condition imply",
                got=str(spec_of_base),
                remedy=_REMEDY,
            )
        # Sums of a base's weights may cross the bound that each of them kept, and every silo would refuse the plan.
        if not bool((tensors[name].abs() <= MAX_WEIGHT).all()):
            raise TensorFileError(
                f"base, tensor {name}",
                expected=f"values of at most {MAX_WEIGHT:g} once it fits the plan",
                got="a larger value, or one that is not finite",
                remedy=_REMEDY,
            )
    for name in tensors:
        if name not in specs:
            raise TensorFileError(
                f"base, tensor {ascii(name[:_MAX_SHOWN])}",
                expected=f"only the {len(specs)} tensors of the {architecture.kind}",
                got="a tensor that this network does not have",
                remedy=_REMEDY,
            )
