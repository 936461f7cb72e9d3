"""Which conditions the samples of an evaluation are drawn under.

Figures of a model that is told a class or a text are figures of a mixture over conditions. By default that mixture is
the reference's own: each sample is drawn under the class, or the caption, of a reference image, each image in turn in a
random order, so that classes are as frequent as in the reference.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddm.cli.options import check_null, check_text
from ddm.errors import DataError, SetupError
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition

if TYPE_CHECKING:
    from torch import Tensor

    from ddm.evaluation.reference import Reference
    from ddm.sampling.guidance import ConditionValue

_WAYS = ("data", "equal", "none")
_LEAST = 8  # reference images of a class


@dataclass(frozen=True)
class Asked:
    """The options.

    Args:
        label: data, equal, none, or a class by name or number; None for what suits the release and the reference.
        text: of all samples.
        text_encoder: the folder of the plan's encoder; without a text, samples are told the reference's captions.

    Raises:
        SetupError: options that do not go together, or no class.
    """

    label: str | None
    text: str | None
    text_encoder: Path | None

    def __post_init__(self) -> None:
        if self.flag == "--text" and self.label is not None:
            raise SetupError(
                "--text",
                expected="either --text or --class",
                got=f"both, with --class {self.label}",
            )
        if self.text is not None:
            check_text(self.text, self.text_encoder)

    @property
    def flag(self) -> str | None:
        """The option that asks for a condition, if one does."""
        if self.text is not None or self.text_encoder is not None:
            return "--text" if self.text is not None else "--text-encoder"
        return None if self.label is None else "--class"


@dataclass(frozen=True)
class Conditions:
    """What samples are told.

    Attributes:
        value: the condition of all samples, or of each; None for none.
        words: what it is.
        kept: which reference images are compared with, where samples are all of one class.
    """

    value: "ConditionValue | None"
    words: str
    kept: list[bool] | None = None


def conditions_for(
    asked: Asked,
    condition: Condition,
    reference: "Reference",
    num: int,
    seed: int,
    *,
    counted: bool,
) -> Conditions:
    """Return what each of `num` samples is told.

    Args:
        asked: the options.
        condition: the plan's.
        reference: the images to compare with.
        num: of samples.
        seed: of the order of reference images.
        counted: whether each expert's share of a class is known.

    Raises:
        SetupError: experts that do not take the condition, or a reference that has none.
        DataError: labels or captions of the reference that do not fit.
    """
    match condition:
        case ClassCondition():
            if asked.flag in ("--text", "--text-encoder"):
                raise SetupError(
                    str(asked.flag), expected="experts with texts", got="experts with classes"
                )
            return _classes(asked.label, condition, reference, num, seed, counted=counted)
        case TextCondition():
            if asked.label not in (None, "none"):
                got = "experts with texts"
                raise SetupError(
                    "--class", expected="experts with classes, or --class none", got=got
                )
            return _texts(asked, condition, reference, num, seed)
    if asked.flag and asked.label != "none":
        remedy = f"Leave {asked.flag} out."
        raise SetupError(
            asked.flag, expected="experts with conditions", got="experts without", remedy=remedy
        )
    return Conditions(None, "without a condition")


def _classes(
    label: str | None,
    condition: ClassCondition,
    reference: "Reference",
    num: int,
    seed: int,
    *,
    counted: bool,
) -> Conditions:
    import torch

    from ddm.evaluation.reference import classes_of

    if label not in ("equal", "none"):
        label_M = classes_of(reference, condition.classes) if counted or label is not None else None
        if label not in (None, "data"):
            return _one_class(str(label), condition, label_M)
        if label_M is not None:
            words = "each under the class of a reference image"
            return Conditions(label_M[_in_turn(len(label_M), num, seed)], words)
        if label == "data":
            expected, got = (
                "labels of the reference, in a column labels",
                "a reference without them",
            )
            raise SetupError(
                "--class data",
                expected=expected,
                got=got,
                remedy="Use --class equal or --class none.",
            )
    if label == "equal" or (label is None and counted and not condition.drop):
        classes = torch.arange(condition.num_classes)
        words = f"all {condition.num_classes} classes equally often"
        return Conditions(classes[_in_turn(len(classes), num, seed)], words)
    return _nothing("class", condition)


def _one_class(text: str, condition: ClassCondition, label_M: "Tensor | None") -> Conditions:
    label = condition.classes.number(text)
    if label is None:
        expected = f"{', '.join(_WAYS)}, or a class, {condition.classes.words()}"
        raise SetupError("--class", expected=expected, got=repr(text[:40]))
    name = condition.classes.name(label)
    if label_M is None:
        return Conditions(label, f"class {name}, against all reference images")
    kept = _of_class(label, condition, label_M, "reference")
    return Conditions(label, f"class {name}, against reference images of it", kept)


def held_of_class(label: int, condition: ClassCondition, holdout: "Reference") -> "Reference":
    """Return the held-out images of a class, of which alone the samples and the reference are.

    Raises:
        SetupError: a holdout without labels.
        DataError: labels that do not fit, or too few images of the class.
    """
    from ddm.evaluation.reference import classes_of

    if (label_M := classes_of(holdout, condition.classes)) is None:
        expected, got = (
            "labels of the held-out images, as of the reference",
            "held-out images without labels",
        )
        raise SetupError(
            "--holdout", expected=expected, got=got, remedy="Leave --holdout or --class out."
        )
    return holdout.select(_of_class(label, condition, label_M, "holdout"))


def _of_class(label: int, condition: ClassCondition, label_M: "Tensor", what: str) -> list[bool]:
    kept: list[bool] = (label_M == label).tolist()
    if sum(kept) < _LEAST:
        expected = f"at least {_LEAST} images of class {condition.classes.name(label)}"
        raise DataError(f"labels of the {what}", expected=expected, got=str(sum(kept)))
    return kept


def _texts(
    asked: Asked, condition: TextCondition, reference: "Reference", num: int, seed: int
) -> Conditions:
    if asked.text_encoder is None:
        return _nothing("text", condition)
    import numpy as np
    import torch

    from ddm.cli.conditions import encoded, encoder_of
    from ddm.evaluation.reference import captions_of

    if asked.text is not None:
        return Conditions(encoded(asked.text, asked.text_encoder, condition), "one text")
    captions = captions_of(reference)
    if captions is None:
        expected, got = (
            "--text, or captions of the reference, in a column captions",
            "an encoder alone",
        )
        raise SetupError("--text-encoder", expected=expected, got=got)
    chosen = [captions[row] for row in _in_turn(len(captions), num, seed).tolist()]
    distinct, place_N = np.unique(np.array(chosen), return_inverse=True)
    vectors = encoder_of(asked.text_encoder, condition).encode([str(text) for text in distinct])
    return Conditions(
        vectors[torch.from_numpy(place_N)], "each under the caption of a reference image"
    )


def _nothing(kind: str, condition: Condition) -> Conditions:
    """Return the null condition.

    Raises:
        SetupError: experts that never learned it.
    """
    remedy = "Give --class data or --class equal." if kind == "class" else "Give --text-encoder."
    check_null(condition, "condition", remedy)
    return Conditions(None, f"without a {kind}")


def _in_turn(count: int, num: int, seed: int) -> "Tensor":
    """Return `num` row numbers out of so many, each row equally often up to one, in a random order."""
    import torch

    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.repeat(-(-num // count))[:num]
