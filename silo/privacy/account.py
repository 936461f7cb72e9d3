"""An account of the privacy ledger for its operator: each debit with its cost, and what is left."""

from dataclasses import asdict, dataclass

from ddm.privacy.accounting import adaptive_epsilon
from ddm.system.console import table
from silo.privacy.ledger import Debit, Draw, Ledger


@dataclass(frozen=True)
class Line:
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
        head: digest of the last record.
    """

    lines: tuple[Line, ...]
    budget_epsilon: float
    delta: float
    spent: float
    head: str

    @property
    def left(self) -> float:
        """Epsilon that remains, were it spent as one more step; composition may make several plans cheaper."""
        return max(self.budget_epsilon - self.spent, 0.0)

    def as_json(self) -> dict[str, object]:
        """Return the account as it is printed for scripts."""
        return asdict(self) | {"left": self.left}

    def text(self) -> str:
        """Return the account as a table."""
        rows = [
            (
                line.at,
                line.plan_id,
                line.unit,
                ", ".join(line.mechanisms),
                f"{line.epsilon:.4g}",
                f"{line.total:.4g}",
            )
            for line in self.lines
        ]
        head = ("paid at", "plan", "unit", "for", "epsilon", "in all")
        spent = f"epsilon {self.spent:.4g} of {self.budget_epsilon:g} at delta {self.delta:g}; {self.left:.4g} left."
        return "\n".join(
            [table(rows, head) if rows else "Nothing was spent yet.", spent, f"Head: {self.head}"]
        )


def account(ledger: Ledger) -> Account:
    """Read a ledger and price every debit.

    Raises:
        LedgerError: the ledger does not verify.
    """
    entries, delta = ledger.entries, ledger.budget.delta
    drawn: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry.record, Draw):
            drawn.setdefault(entry.record.debit, []).append(entry.record.kind)
    steps, lines = [], []
    for entry in entries:
        if isinstance(debit := entry.record, Debit):
            steps.append(tuple(debit.mechanisms.values()))
            lines.append(
                Line(
                    at=f"{debit.at:%Y-%m-%d %H:%M}Z",
                    plan_id=debit.plan_id,
                    unit=debit.unit,
                    mechanisms=tuple(sorted(debit.mechanisms)),
                    drawn=tuple(sorted(drawn.get(entry.digest, ()))),
                    epsilon=adaptive_epsilon(steps[-1:], delta),
                    total=adaptive_epsilon(steps, delta),
                )
            )
    spent = lines[-1].total if lines else 0.0
    return Account(tuple(lines), ledger.budget.epsilon, delta, spent, ledger.head[0])
