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

# More would fill the screen with a federation of a hundred silos.
_MAX_EXPERTS_LISTED = 12


def encode_text(text: str, folder: Path, condition: Condition) -> ConditionValue:
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
        raise SetupError(
            "--text",
            expected="experts with texts as conditions",
            got=_describe_experts(condition),
            remedy="Leave --text out.",
        )
    encoder = open_text_encoder(folder, condition)
    # Said, not refused: the first words are usually the subject.
    if encoder.num_cut([text]):
        say(f"The text is longer than {condition.max_tokens} tokens; the rest is cut off.")
    vectors = encoder.encode([text])[0]
    # All zeros is the null condition: the samples would silently have none.
    if not vectors.any():
        raise SetupError(
            "--text",
            expected="a text with at least one word that the encoder knows",
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
        raise SetupError(
            "--class",
            expected="experts with classes as conditions",
            got=_describe_experts(condition),
            remedy="Leave --class out.",
        )
    number = condition.classes.number(text)
    if number is None:
        raise SetupError(
            "--class",
            expected=f"a class, {condition.classes.choices()}",
            got=repr(text[:40]),
            remedy="Name one of these. `ddm info RELEASE --root FILE` lists the classes of a release.",
        )
    return number


def _describe_experts(condition: Condition) -> str:
    if isinstance(condition, ClassCondition):
        return "experts with classes"
    if isinstance(condition, TextCondition):
        return "experts with texts"
    return "experts without conditions"


def open_text_encoder(folder: Path, condition: TextCondition) -> "TextEncoder":
    """Open the encoder that the plan pins."""
    # Importing it takes seconds.
    from ddm.encoders.text import TextEncoder

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
    # Checked also where the shares are declared, so that a wrong condition is always refused.
    expert_condition, _ = condition_and_null(ensemble.condition, condition)
    if declared is not None:
        return declared
    if isinstance(condition, int) and ensemble.class_prior:
        return list(ensemble.class_prior(condition).prior)
    # Neither declared nor counted: a router that reads conditions has learned the shares.
    learned = router_shares(ensemble.router, expert_condition, ensemble.prior)
    if learned or isinstance(condition, int):
        return learned
    return list(ensemble.prior)


def shares_of_each(
    ensemble: Ensemble,
    condition: ConditionValue | None,
    target_prior: list[float],
    declared: list[float] | None,
) -> Tensor:
    """Return the shares that are due under the condition of all samples, (K,), or under each one's class, (N, K)."""
    if isinstance(condition, Tensor) and condition.dim() == 1:
        # A class for each sample: the shares of each class are computed once.
        labels, place_N = torch.unique(condition, return_inverse=True)
        share_rows = []
        for label in labels.tolist():
            class_shares = condition_shares(ensemble, label, declared)
            share_rows.append(expert_shares(ensemble, target_prior, class_shares))
        return torch.stack(share_rows)[place_N]
    if isinstance(condition, Tensor) and condition.dim() == 3:
        # A text for each sample, which all have the same shares.
        condition = condition[0]
    shares = condition_shares(ensemble, condition, declared)
    return expert_shares(ensemble, target_prior, shares)


def expert_shares(
    ensemble: Ensemble, target_prior: list[float], class_prior: list[float] | None
) -> Tensor:
    """Return each expert's share of the samples that is due, under the prior and the condition, shape (K,)."""
    # Without a condition the shares are the declared prior itself.
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
    """Describe the share of the samples that each expert had, beside its prior; of many, those with most samples."""
    prior = expert_shares(ensemble, target_prior, class_prior).tolist()
    word = "prior" if label is None else f"prior given class {label}"
    experts = list(zip(ensemble.expert_ids, shares, prior, strict=True))
    others = []
    if len(experts) > _MAX_EXPERTS_LISTED:
        experts.sort(key=lambda expert: expert[1], reverse=True)
        others = experts[_MAX_EXPERTS_LISTED:]
    parts = [
        f"{expert_id} {share:.2f} ({word} {due:.2f})"
        for expert_id, share, due in experts[:_MAX_EXPERTS_LISTED]
    ]
    if others:
        share_of_others = sum(share for _, share, _ in others)
        parts.append(f"and {len(others)} others {share_of_others:.2f} in all")
    return ", ".join(parts)
