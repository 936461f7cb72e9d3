"""The condition of a sample, a class or a text, and the share of the samples that each expert should have."""

from pathlib import Path

from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.protocol.plan import ClassCondition, Condition, TextCondition
from ddm.sampling.guidance import ConditionValue, condition_and_null, conditional_log_prior
from ddm.system.console import say


def encoded(text: str, folder: Path, condition: Condition) -> ConditionValue:
    """Return what experts are told of a text, by the encoder that the release's plan pins.

    Args:
        text: the prompt.
        folder: the encoder's.
        condition: the plan's.

    Raises:
        SetupError: these experts are told no texts, the plan pins no encoder, or nothing is left of the text.
        MissingFileError, DigestError: the folder holds another encoder.
    """
    if not isinstance(condition, TextCondition):
        got = "experts " + ("with classes" if isinstance(condition, ClassCondition) else "without conditions")
        raise SetupError("--text", expected="experts with texts as conditions", got=got, remedy="Leave --text out.")
    from ddm.encoders.text import TextEncoder  # takes seconds

    encoder = TextEncoder.open(folder, condition)
    if encoder.num_cut([text]):
        say(f"The text is longer than {condition.max_tokens} tokens; the rest is cut off.")
    vectors = encoder.encode([text])[0]
    if not vectors.any():  # the null condition
        got = f"{len(text)} characters without one"
        raise SetupError("--text", expected="words that the encoder has tokens for", got=got)
    return vectors


def holders_of(ensemble: Ensemble, asked: ConditionValue | None, declared: list[float] | None) -> list[float] | None:
    """Return every expert's share of the data with the condition: as declared, as released, of a text as of all.

    Raises:
        MathError: these experts cannot be asked for it.
    """
    if asked is not None:
        condition_and_null(ensemble.condition, asked)
    if asked is None or declared is not None:
        return declared
    if not isinstance(asked, int):
        return list(ensemble.prior)
    return list(ensemble.class_prior(asked).prior) if ensemble.class_prior else None


def shares_of(
    ensemble: Ensemble,
    found: tuple[float, ...],
    wanted: list[float],
    holders: list[float] | None,
    label: int | None,
) -> str:
    """Say what share of the samples each expert had, beside the share that it should have."""
    prior = wanted if holders is None else conditional_log_prior(holders, ensemble.prior, wanted).exp().tolist()
    word = "prior" if label is None else f"prior given class {label}"
    parts = zip(ensemble.expert_ids, found, prior, strict=True)
    return ", ".join(f"{name} {share:.2f} ({word} {due:.2f})" for name, share, due in parts)
