"""Writes a network as a program of torch.export or ONNX, which takes any number of samples."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ddm.errors import SetupError
from ddm.export.model import ExportedModel
from ddm.protocol.architecture import ClassCondition, Condition, Shape, TextCondition

TORCH_FILE = "model.pt2"
ONNX_FILE = "model.onnx"
MAX_SAMPLES = 65_536

# Two, since torch writes a program for exactly one sample where it is shown one.
_TRACED_SAMPLES = 2


def write_torch_program(model: ExportedModel, folder: Path) -> None:
    """Write `model.pt2`, for `torch.export.load`."""
    with _without_warnings():
        torch.export.save(_trace(model), folder / TORCH_FILE)


def write_onnx(model: ExportedModel, folder: Path) -> None:
    """Write `model.onnx`, and its weights in `model.onnx.data`.

    Raises:
        SetupError: the extra `onnx` is not installed.
    """
    require_onnx()
    with _without_warnings():
        torch.onnx.export(
            _trace(model),
            f=folder / ONNX_FILE,
            dynamo=True,
            input_names=input_names(model.condition),
            output_names=[model.output],
            external_data=True,
            verbose=False,
        )


@contextmanager
def _without_warnings() -> Iterator[None]:
    # Of torch about its own functions, of which an operator can change nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def require_onnx() -> None:
    """Refuse to write ONNX without the packages that torch writes it with.

    Raises:
        SetupError: the extra `onnx` is not installed.
    """
    for name in ("onnx", "onnxscript"):
        if find_spec(name) is None:
            raise SetupError(
                "--onnx",
                expected="an installed onnx and onnxscript",
                got=f"no module {name}",
                remedy="Install them: in Archipelago's repository, pip install '.[onnx]'.",
            )


def input_names(condition: Condition) -> list[str]:
    """Return the names of a program's inputs, in order."""
    names = ["x", "t"]
    if isinstance(condition, ClassCondition):
        names.append("class")
    elif isinstance(condition, TextCondition):
        names.append("text")
    return names


def example_inputs(shape: Shape, condition: Condition, num: int) -> tuple[Tensor, ...]:
    """Return inputs of this many samples, by the same random numbers each time.

    Args:
        shape: one sample.
        condition: the kind of condition.
        num: B.

    Returns:
        x (B, ...), t (B,), and classes (B,), of which -1 is none, or texts (B, L, D) of L = `max_tokens` tokens, of
        which a token of zeros is padding.
    """
    random = torch.Generator().manual_seed(0)
    x_B = torch.randn(num, *shape, generator=random)
    t_B = torch.rand(num, generator=random)
    if isinstance(condition, ClassCondition):
        class_B = torch.randint(-1, condition.num_classes, (num,), generator=random)
        return x_B, t_B, class_B
    if isinstance(condition, TextCondition):
        text_BLD = torch.randn(num, condition.max_tokens, condition.dim, generator=random)
        # The first sample has one token and padding.
        text_BLD[0, 1:] = 0
        return x_B, t_B, text_BLD
    return x_B, t_B


def _trace(model: ExportedModel) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=MAX_SAMPLES)
    inputs = example_inputs(model.shape, model.condition, _TRACED_SAMPLES)
    # The first side of every input is the number of samples.
    sides = tuple({0: batch} for _ in inputs)
    with torch.no_grad():
        return torch.export.export(model.network, inputs, dynamic_shapes=sides)
