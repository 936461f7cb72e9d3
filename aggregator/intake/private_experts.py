"""Checks what a submission says about the privacy of an expert's weights: what the plan asks for, with enough noise."""

from ddm.errors import PolicyError
from ddm.privacy.accounting import noise_multiplier_for
from ddm.protocol.plan import Plan
from ddm.protocol.submission import SubmittedExpert
from ddm.protocol.weight_privacy import DpSgdPrivacy

_SAME = 1e-2  # of a noise multiplier, which each machine searches for


def check_privacy(plan: Plan, expert: SubmittedExpert, num_units: int) -> None:
    """Refuse an expert that states more, less or other privacy than the plan asks of a silo of so many units.

    Raises:
        PolicyError: names the first field that differs.
    """
    terms, stated, subject = (
        plan.expert.privacy,
        expert.privacy,
        f"submission, privacy of {expert.expert_id}",
    )
    if terms is None:
        if isinstance(stated, DpSgdPrivacy):
            raise PolicyError(
                subject, expected="no guarantee, as the plan asks for none", got=str(stated)
            )
        return
    if not isinstance(stated, DpSgdPrivacy):
        raise PolicyError(
            subject,
            expected=f"epsilon {terms.epsilon:g}, delta {terms.delta:g}",
            got="no guarantee",
        )
    required = (terms.epsilon, terms.delta, plan.statistics.unit, terms.rate(num_units))
    if (stated.epsilon, stated.delta, stated.unit, stated.rate) != required:
        expected = f"epsilon {terms.epsilon:g}, delta {terms.delta:g} per {required[2]}, rate {required[3]:.6g}"
        raise PolicyError(subject, expected=expected, got=f"{stated}, rate {stated.rate:.6g}")
    least = noise_multiplier_for(
        terms.epsilon, terms.delta, stated.rate, plan.expert.training.num_steps
    )
    if stated.noise_multiplier < least * (1 - _SAME):
        got = f"{stated.noise_multiplier:.4g}"
        raise PolicyError(f"{subject}, noise multiplier", expected=f"at least {least:.4g}", got=got)
    if expert.training.seconds is not None:
        raise PolicyError(
            f"{subject}, seconds", expected="none: they tell of the images", got="a number"
        )
