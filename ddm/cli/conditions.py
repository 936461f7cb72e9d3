"""Turns the condition of a sample, a class or a text, into what the experts take, and into each expert's share."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.protocol.architecture import ClassCondition, Condition, TextCondition
from ddm.sampling.guidance import (
    ConditionValue,
    condition_and_null,
    conditional_log_prior,
    router_shares,
)
from ddm.system.console import say

if TYPE_CHECKING:
    from ddm.encoders.text import TextEncoder


def encoded(text: str, folder: Path, condition: Condition) -> ConditionValue:
    """Return the token embeddings of a text, by the encoder that the release's plan pins.

    Args:
        text: the prompt.
        folder: the encoder's.
        condition: the plan's.

    Raises:
        SetupError: these experts take no texts, the plan pins no encoder, or the encoder knows no word of the text.
        MissingFileError, DigestError: the folder holds another encoder.
    """
    if not isinstance(condition, TextCondition):
        got = "experts " + (
            "with classes" if isinstance(condition, ClassCondition) else "without conditions"
        )
        raise SetupError(
            "--text",
            expected="experts with texts as conditions",
            got=got,
            remedy="Leave --text out.",
        )
    encoder = encoder_of(folder, condition)
    if encoder.num_cut([text]):
        say(f"The text is longer than {condition.max_tokens} tokens; the rest is cut off.")
    vectors = encoder.encode([text])[0]
    if not vectors.any():  # the null condition
        expected = "a text with at least one word that the encoder knows"
        raise SetupError(
            "--text",
            expected=expected,
            got=f"{len(text)} characters without one",
            remedy="Reword it.",
        )
    return vectors


def class_number(text: str, condition: Condition) -> int:
    """Return the number of a class that is given by its name or number.

    Raises:
        SetupError: these experts take no classes, or have none of this name.
    """
    if not isinstance(condition, ClassCondition):
        got = "experts " + (
            "with texts" if isinstance(condition, TextCondition) else "without conditions"
        )
        remedy = "Leave --class out."
        raise SetupError(
            "--class", expected="experts with classes as conditions", got=got, remedy=remedy
        )
    if (number := condition.classes.number(text)) is None:
        expected, got = f"a class, {condition.classes.words()}", repr(text[:40])
        raise SetupError(
            "--class",
            expected=expected,
            got=got,
            remedy="`ddm info` lists the classes of a release.",
        )
    return number


def encoder_of(folder: Path, condition: TextCondition) -> "TextEncoder":
    """Open the encoder that the plan pins."""
    from ddm.encoders.text import TextEncoder  # takes seconds

    return TextEncoder.open(folder, condition)


def condition_shares(
    ensemble: Ensemble, condition: ConditionValue | None, declared: list[float] | None
) -> list[float] | None:
    """Return each expert's share of the data with the condition; None where it is unknown or there is no condition.

    Declared shares come first, then those that the release states for a class, then those that a router learned which
    reads conditions; else a text has the prior of all images.

    Raises:
        MathError: these experts do not take the condition.
    """
    if condition is None:
        return declared
    told, _ = condition_and_null(ensemble.condition, condition)
    if declared is not None:
        return declared
    if isinstance(condition, int) and ensemble.class_prior:
        return list(ensemble.class_prior(condition).prior)
    learned = router_shares(ensemble.router, told, ensemble.prior)
    return learned if learned or isinstance(condition, int) else list(ensemble.prior)


def shares_of_each(
    ensemble: Ensemble,
    condition: ConditionValue | None,
    target_prior: list[float],
    declared: list[float] | None,
) -> Tensor:
    """Return the shares that are due under the condition of all samples, (K,), or under each one's class, (N, K)."""
    if not isinstance(condition, Tensor) or condition.dim() != 1:
        one = condition[0] if isinstance(condition, Tensor) and condition.dim() == 3 else condition
        return expert_shares(ensemble, target_prior, condition_shares(ensemble, one, declared))
    labels, group_N = torch.unique(condition, return_inverse=True)
    each = [condition_shares(ensemble, label, declared) for label in labels.tolist()]
    return torch.stack([expert_shares(ensemble, target_prior, shares) for shares in each])[group_N]


def expert_shares(
    ensemble: Ensemble, target_prior: list[float], class_prior: list[float] | None
) -> Tensor:
    """Return each expert's share of the samples that is due, under the prior and the condition, shape (K,)."""
    if class_prior is None:
        weight_K = torch.tensor(target_prior, dtype=torch.float64)
        return weight_K / weight_K.sum()
    return conditional_log_prior(class_prior, ensemble.prior, target_prior).exp()


def describe_shares(
    ensemble: Ensemble,
    shares: tuple[float, ...],
    target_prior: list[float],
    class_prior: list[float] | None,
    label: str | None,
) -> str:
    """Describe the share of the samples that each expert had, beside its prior."""
    prior = expert_shares(ensemble, target_prior, class_prior).tolist()
    word = "prior" if label is None else f"prior given class {label}"
    parts = zip(ensemble.expert_ids, shares, prior, strict=True)
    return ", ".join(
        f"{expert_id} {share:.2f} ({word} {due:.2f})" for expert_id, share, due in parts
    )
