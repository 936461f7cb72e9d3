"""An account of the privacy ledger for its operator: each debit with its cost, and what is left."""

from dataclasses import asdict, dataclass

from ddm.privacy.accounting import Mechanism, adaptive_epsilon
from ddm.system.console import table
from silo.privacy.ledger import Debit, Ledger, NoiseDraw


@dataclass(frozen=True)
class AccountLine:
    """One debit.

    Attributes:
        at: when, UTC.
        plan_id: for which plan.
        unit: whom the plan's statistics protect.
        mechanisms: what was paid for.
        drawn: what of it was drawn.
        epsilon: its cost alone, at the budget's delta.
        total: the cost of everything up to and with it.
    """

    at: str
    plan_id: str
    unit: str
    mechanisms: tuple[str, ...]
    drawn: tuple[str, ...]
    epsilon: float
    total: float


@dataclass(frozen=True)
class Account:
    """All debits, and the budget.

    Attributes:
        lines: oldest first.
        budget_epsilon: what the site may spend over all time.
        delta: the budget's.
        spent: epsilon of everything.
        left: the largest epsilon that a further debit may have, see `Ledger.left`.
        head: digest of the last record.
    """

    lines: tuple[AccountLine, ...]
    budget_epsilon: float
    delta: float
    spent: float
    left: float
    head: str

    def as_json(self) -> dict[str, object]:
        """Return the account as it is printed for scripts."""
        return asdict(self)

    def text(self) -> str:
        """Return the account as a table."""
        spent = f"epsilon {self.spent:.4g} of {self.budget_epsilon:g} at delta {self.delta:g}; {self.left:.4g} left."
        if not self.lines:
            return "\n".join(["Nothing was spent yet.", spent, f"Head: {self.head}"])
        rows = []
        for line in self.lines:
            paid_for = ", ".join(line.mechanisms)
            epsilon = f"{line.epsilon:.4g}"
            total = f"{line.total:.4g}"
            rows.append((line.at, line.plan_id, line.unit, paid_for, epsilon, total))
        heads = ("paid at", "plan", "unit", "for", "epsilon", "in all")
        return "\n".join([table(rows, heads), spent, f"Head: {self.head}"])


def account(ledger: Ledger) -> Account:
    """Read a ledger and price every debit.

    Raises:
        LedgerError: the ledger does not verify.
    """
    entries = ledger.entries
    delta = ledger.budget.delta
    drawn_kinds: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry.record, NoiseDraw):
            kinds = drawn_kinds.setdefault(entry.record.debit, [])
            kinds.append(entry.record.kind)
    # One step a debit, in their order: a later plan may depend on what an earlier one released, so that they compose
    # adaptively.
    steps: list[tuple[Mechanism, ...]] = []
    lines: list[AccountLine] = []
    for entry in entries:
        debit = entry.record
        if not isinstance(debit, Debit):
            continue
        steps.append(tuple(debit.mechanisms.values()))
        drawn = drawn_kinds.get(entry.digest, [])
        line = AccountLine(
            at=f"{debit.at:%Y-%m-%d %H:%M}Z",
            plan_id=debit.plan_id,
            unit=debit.unit,
            mechanisms=tuple(sorted(debit.mechanisms)),
            drawn=tuple(sorted(drawn)),
            # As if it were the only one. The total may be above the sum of these, since debits share delta.
            epsilon=adaptive_epsilon(steps[-1:], delta),
            total=adaptive_epsilon(steps, delta),
        )
        lines.append(line)
    spent = 0.0
    if lines:
        spent = lines[-1].total
    return Account(
        lines=tuple(lines),
        budget_epsilon=ledger.budget.epsilon,
        delta=delta,
        spent=spent,
        left=ledger.left(),
        head=ledger.head[0],
    )
