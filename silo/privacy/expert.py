"""Pays for the private training of an expert, and ensures that one debit pays for one expert.

The debit is on disk before the first step, and covers the plan's statistics too. A training that was killed continues
with the noise of its secret, so it spends nothing again. The expert's digest is recorded as the debit's draw before the
secret is deleted: from then on no other expert may leave for this debit.
"""

from dataclasses import dataclass
from pathlib import Path

from ddm.errors import LedgerError
from ddm.privacy.accounting import Mechanism
from ddm.protocol.base import sha256_file
from ddm.protocol.weight_privacy import DpSgdMechanism, DpSgdPrivacy, NoWeightPrivacy
from silo.privacy.ledger import Debit, Ledger, LedgerEntry
from silo.privacy.spending import PlannedSpending


@dataclass(frozen=True)
class PaidTraining:
    """The private training that a debit pays for.

    Attributes:
        ledger: the ledger of this site.
        debit: on disk.
    """

    ledger: Ledger
    debit: LedgerEntry

    @property
    def mechanism(self) -> DpSgdMechanism:
        """What was paid for, also where this machine would have found another noise."""
        return _paid(self.debit)

    def check_undrawn(self) -> None:
        """Refuse to train where an expert was trained for this debit already.

        Raises:
            LedgerError: another expert of the same debit would spend its epsilon twice.
        """
        if self.ledger.draw_of(self.debit, "expert") is not None:
            raise LedgerError(
                "private training",
                expected="a debit for which no expert was trained",
                got="a debit whose expert was trained and is missing",
                remedy=(
                    "Restore private/ from backup, or give the plan up: `silo withdraw SITE`. Another "
                    "expert needs another debit, and so a new plan."
                ),
            )

    def record(self, expert: Path) -> None:
        """Record the trained expert as the debit's one draw; a second call with the same file changes nothing.

        Raises:
            LedgerError: another one was recorded.
        """
        # Where another digest is recorded already, `record_draw` refuses this one.
        with self.ledger.drawing():
            digest = sha256_file(expert)
            if self.ledger.draw_of(self.debit, "expert") != digest:
                self.ledger.record_draw(self.debit, "expert", digest)


def pay_for_training(spending: PlannedSpending, ledger: Ledger) -> PaidTraining:
    """Debit all that a plan draws that trains privately, before the first step; a second call finds the first debit.

    Raises:
        BudgetError: the ledger would go over; nothing was debited and nothing is trained.
        LedgerError: the ledger is damaged.
    """
    return PaidTraining(ledger, spending.pay_from(ledger))


def stated_privacy(
    spending: PlannedSpending,
    ledger: Ledger,
) -> NoWeightPrivacy | DpSgdPrivacy:
    """Return what a submission says about its experts' weights, from the debit that paid for training on these data.

    Raises:
        LedgerError: the plan trains privately, and nothing was debited for it on these data.
    """
    plan = spending.plan
    terms = plan.expert.privacy
    if terms is None:
        return NoWeightPrivacy()
    # The noise multiplier comes from the debit and is not computed again: it is found by a search, which may end
    # elsewhere on another machine, and what was paid for is what the training used.
    debit = spending.debit_in(ledger)
    if debit is None:
        expected = "a debit for this plan on these data"
        raise LedgerError("private training", expected=expected, got="no such debit")
    return DpSgdPrivacy(
        epsilon=terms.epsilon,
        delta=terms.delta,
        unit=plan.statistics.unit,
        noise_multiplier=_paid(debit).noise_multiplier,
        rate=terms.rate(spending.num_units),
    )


def _paid(debit: LedgerEntry) -> DpSgdMechanism:
    mechanism: Mechanism | None = None
    if isinstance(debit.record, Debit):
        mechanism = debit.record.mechanisms.get("expert")
    if not isinstance(mechanism, DpSgdMechanism):
        raise LedgerError(
            "private training",
            expected="a debit that covers an expert",
            got="one of statistics alone",
        )
    return mechanism
