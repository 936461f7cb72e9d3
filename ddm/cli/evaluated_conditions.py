"""Which conditions the samples of an evaluation are drawn under.

Figures of a model with classes or texts are figures of a mixture over conditions. By default that mixture is
the reference's own: each sample is drawn under the class, or the caption, of a reference image, each image in turn in a
random order, so that classes are as frequent as in the reference.
"""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddm.cli.options import WHAT, GuidanceOption, TextOption, check_null, check_text
from ddm.errors import DataError, SetupError
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition, learns_null

if TYPE_CHECKING:
    from torch import Tensor

    from ddm.evaluation.reference import Reference
    from ddm.sampling.guidance import ConditionValue

# Values of --class besides a class itself.
_WAYS = ("data", "equal", "none")
_MIN_CLASS_IMAGES = 8  # reference images of a class


ClassesOption = Annotated[
    str | None,
    typer.Option(
        "--class",
        metavar="WAY",
        help="Classes of the samples: data (as in the reference), equal, none, or one class.",
        rich_help_panel=WHAT,
    ),
]
EncoderOption = Annotated[
    Path | None,
    typer.Option(
        "--text-encoder",
        metavar="FOLDER",
        help="Folder of the plan's text encoder, for --text or the reference's captions.",
        rich_help_panel=WHAT,
    ),
]


@dataclass(frozen=True)
class ReferenceConditionOptions:
    """The options on conditions of `ddm evaluate`.

    `--class` has other values than in `ddm sample`, since the reference may give the classes.

    Args:
        label: data, equal, none, or a class by name or number; None for what suits the release and the reference.
        text: the text of all samples.
        text_encoder: the folder of the plan's encoder; without a text, samples get the reference's captions.
        guidance: its strength.

    Raises:
        SetupError: options that do not go together, or no class.
    """

    label: ClassesOption = None
    text: TextOption = None
    text_encoder: EncoderOption = None
    guidance: GuidanceOption = None

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
        if self.text is not None:
            return "--text"
        if self.text_encoder is not None:
            return "--text-encoder"
        if self.label is not None:
            return "--class"
        return None


@dataclass(frozen=True)
class EvaluatedConditions:
    """The conditions of samples.

    Attributes:
        value: the condition of all samples, or of each; None for none.
        words: what it is.
        compared_images: which reference images are compared with, where samples are all of one class.
    """

    value: "ConditionValue | None"
    words: str
    compared_images: list[bool] | None = None


def conditions_for(
    options: ReferenceConditionOptions,
    condition: Condition,
    reference: "Reference",
    num: int,
    seed: int,
    *,
    counted: bool,
) -> EvaluatedConditions:
    """Return the condition of each of `num` samples.

    Args:
        options: from the command line.
        condition: the plan's.
        reference: the images to compare with.
        num: the number of samples.
        seed: the seed of the order of reference images.
        counted: whether each expert's share of a class is known.

    Raises:
        SetupError: experts that do not take the condition, or a reference that has none.
        DataError: labels or captions of the reference that do not fit.
    """
    match condition:
        case ClassCondition():
            if options.flag in ("--text", "--text-encoder"):
                raise SetupError(
                    str(options.flag), expected="experts with texts", got="experts with classes"
                )
            return _class_conditions(
                options.label, condition, reference, num, seed, counted=counted
            )
        case TextCondition():
            if options.label not in (None, "none"):
                raise SetupError(
                    "--class",
                    expected="experts with classes, or --class none",
                    got="experts with texts",
                )
            return _text_conditions(options, condition, reference, num, seed)
    if options.flag and options.label != "none":
        raise SetupError(
            options.flag,
            expected="experts with conditions",
            got="experts without",
            remedy=f"Leave {options.flag} out.",
        )
    return EvaluatedConditions(None, "without a condition")


def _class_conditions(
    label: str | None,
    condition: ClassCondition,
    reference: "Reference",
    num: int,
    seed: int,
    *,
    counted: bool,
) -> EvaluatedConditions:
    import torch

    from ddm.evaluation.reference import classes_of

    # Classes of the reference come first: samples and real images are then the same mixture of classes.
    if label not in ("equal", "none"):
        label_M = None
        # Without shares of classes, samples under classes could not be drawn in the experts' proportions.
        if counted or label is not None:
            label_M = classes_of(reference, condition.classes)
        if label not in (None, "data"):
            return _one_class(str(label), condition, label_M)
        if label_M is not None:
            words = "each under the class of a reference image"
            return EvaluatedConditions(label_M[_in_turn(len(label_M), num, seed)], words)
        if label == "data":
            raise SetupError(
                "--class data",
                expected="labels of the reference, in a column labels",
                got="a reference without them",
                remedy="Use --class equal or --class none.",
            )
    # Experts with drop = 0 never learned to do without a class, so that each sample needs one.
    if label == "equal" or (label is None and counted and not learns_null(condition)):
        classes = torch.arange(condition.num_classes)
        words = f"all {condition.num_classes} classes equally often"
        return EvaluatedConditions(classes[_in_turn(len(classes), num, seed)], words)
    return _no_condition("class", condition)


def _one_class(
    text: str, condition: ClassCondition, label_M: "Tensor | None"
) -> EvaluatedConditions:
    label = condition.classes.number(text)
    if label is None:
        expected = f"{', '.join(_WAYS)}, or a class, {condition.classes.choices()}"
        raise SetupError("--class", expected=expected, got=repr(text[:40]))
    # Samples of one class are compared with real images of that class where the reference has labels.
    name = condition.classes.name(label)
    if label_M is None:
        return EvaluatedConditions(label, f"class {name}, against all reference images")
    of_class = _images_of_class(label, condition, label_M, "reference")
    return EvaluatedConditions(label, f"class {name}, against reference images of it", of_class)


def select_class(label: int, condition: ClassCondition, holdout: "Reference") -> "Reference":
    """Return the held-out images of a class, of which alone the samples and the reference are.

    Raises:
        SetupError: a holdout without labels.
        DataError: labels that do not fit, or too few images of the class.
    """
    from ddm.evaluation.reference import classes_of

    label_M = classes_of(holdout, condition.classes)
    if label_M is None:
        raise SetupError(
            "--holdout",
            expected="labels of the held-out images, as of the reference",
            got="held-out images without labels",
            remedy="Leave --holdout or --class out.",
        )
    return holdout.select(_images_of_class(label, condition, label_M, "holdout"))


def _images_of_class(
    label: int, condition: ClassCondition, label_M: "Tensor", subject: str
) -> list[bool]:
    of_class: list[bool] = (label_M == label).tolist()
    num_images = sum(of_class)
    if num_images < _MIN_CLASS_IMAGES:
        name = condition.classes.name(label)
        raise DataError(
            f"labels of the {subject}",
            expected=f"at least {_MIN_CLASS_IMAGES} images of class {name}",
            got=str(num_images),
            remedy="Give more images of this class, or evaluate all classes: leave --class out.",
        )
    return of_class


def _text_conditions(
    options: ReferenceConditionOptions,
    condition: TextCondition,
    reference: "Reference",
    num: int,
    seed: int,
) -> EvaluatedConditions:
    if options.text_encoder is None:
        return _no_condition("text", condition)
    import numpy as np
    import torch

    from ddm.cli.conditions import encode_text, open_text_encoder
    from ddm.evaluation.reference import captions_of

    if options.text is not None:
        return EvaluatedConditions(
            encode_text(options.text, options.text_encoder, condition), "one text"
        )
    captions = captions_of(reference)
    if captions is None:
        raise SetupError(
            "--text-encoder",
            expected="--text, or captions of the reference, in a column captions",
            got="an encoder alone",
        )
    chosen = [captions[row] for row in _in_turn(len(captions), num, seed).tolist()]
    # Equal captions are encoded once.
    distinct, place_N = np.unique(np.array(chosen), return_inverse=True)
    encoder = open_text_encoder(options.text_encoder, condition)
    vectors = encoder.encode([str(caption) for caption in distinct])
    return EvaluatedConditions(
        vectors[torch.from_numpy(place_N)], "each under the caption of a reference image"
    )


def _no_condition(kind: str, condition: Condition) -> EvaluatedConditions:
    """Return the null condition.

    Raises:
        SetupError: experts that never learned it.
    """
    remedy = "Give --text-encoder."
    if kind == "class":
        remedy = "Give --class data or --class equal."
    check_null(condition, "condition", remedy)
    return EvaluatedConditions(None, f"without a {kind}")


def _in_turn(count: int, num: int, seed: int) -> "Tensor":
    """Return `num` row numbers out of so many, each row equally often up to one, in a random order."""
    import torch

    # Each row once before any comes again, so that the mixture is that of the reference.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.repeat(ceil(num / count))[:num]
