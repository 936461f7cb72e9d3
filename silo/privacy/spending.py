"""What a plan spends of a site's privacy: the one debit that pays for its statistics and, if private, its training."""

from dataclasses import dataclass

from ddm.protocol.plan import Plan
from ddm.statistics.cost import paid_mechanisms
from silo.privacy.ledger import Ledger, LedgerEntry


@dataclass(frozen=True)
class PlannedSpending:
    """What one plan spends on one version of a site's data.

    Attributes:
        plan: the accepted plan.
        plan_digest: sha256 of its signed bytes.
        dataset_digest: the digest of the cohort; with `plan_digest` it names the debit.
        num_units: the number of units of the cohort, from which the noise of private training follows.
    """

    plan: Plan
    plan_digest: str
    dataset_digest: str
    num_units: int

    def pay_from(self, ledger: Ledger) -> LedgerEntry:
        """Debit all that the plan draws, before the first noise; a second call returns the first debit.

        Raises:
            BudgetError: the ledger would go over; nothing was debited.
            LedgerError: the ledger is damaged.
        """
        return ledger.spend(
            self.plan.plan_id,
            self.plan_digest,
            self.dataset_digest,
            self.plan.statistics.unit,
            paid_mechanisms(self.plan, self.num_units),
        )

    def debit_in(self, ledger: Ledger) -> LedgerEntry | None:
        """Return the debit that paid for it, None where it was not paid yet.

        Raises:
            LedgerError: the ledger is damaged.
        """
        return ledger.debit_of(self.plan_digest, self.dataset_digest)
