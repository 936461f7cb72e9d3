"""Records all privacy that this site has spent, over every plan, federation and dataset version.

Each line is a record that names the digest of the line before it. A debit covers everything that one plan draws from
one version of the data, and is on disk before any of that noise is drawn; each draw is recorded before it is used, so
that one debit never pays for it twice. The budget holds for plans chosen in the light of earlier statistics
(docs/adr/0007-a-ledger-for-adaptive-plans.md).

How the file is written, verified and repaired: `ddm.io.chain`. Half a line that is removed there is a debit or a draw
for which no noise was used. A draw without a debit is refused. What is put back as a whole looks genuine by itself;
`silo.privacy.anchor` says what shows it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from ddm.errors import BudgetError, LedgerError
from ddm.io import chain
from ddm.io.locks import lock_file
from ddm.privacy.accounting import Mechanism, adaptive_epsilon
from ddm.protocol.base import Digest, PlanId, Unit, now_utc, sha256_hex
from ddm.protocol.statistics import Budget, PaidKind
from silo.privacy.anchor import Guard
from silo.privacy.terms import are_same_mechanisms, check_unit, describe_mechanisms

MAX_RECORDS = 4096  # as many as a submission's chain may hold
_GENESIS = sha256_hex(b"archipelago/ledger/1")
_SLACK = 1 + 1e-9  # a plan that costs exactly the budget fits it


class Debit(chain.ChainRecord):
    """Privacy spent: all that a plan draws from one version of the data."""

    record: Literal["debit"] = "debit"
    unit: Unit
    relation: Literal["replace_one"] = "replace_one"
    plan_id: PlanId
    plan_digest: Digest
    mechanisms: Annotated[
        dict[PaidKind, Annotated[Mechanism, Field(discriminator="kind")]], Field(min_length=1)
    ]
    dataset_digest: Digest


class NoiseDraw(chain.ChainRecord):
    """Noise drawn for one kind of a debit's statistics, by the digest of the file that holds it."""

    record: Literal["draw"] = "draw"
    debit: Digest
    kind: PaidKind
    draw_digest: Digest


class _Head(chain.ChainHead):
    format: Literal["archipelago/ledger-head/1"] = "archipelago/ledger-head/1"


_RECORD: TypeAdapter[Debit | NoiseDraw] = TypeAdapter(
    Annotated[Debit | NoiseDraw, Field(discriminator="record")]
)
_FORM = chain.ChainFormat(
    name="ledger",
    parse_record=_RECORD.validate_json,
    head_model=_Head,
    genesis=_GENESIS,
    max_records=MAX_RECORDS,
    error=LedgerError,
    disk_full_remedy="Make room on the disk, then run it again; the ledger is as it was, or counts the noise as spent.",
)
LedgerEntry = chain.ChainEntry[Debit | NoiseDraw]


class Ledger:
    """The privacy ledger of one site.

    Args:
        path: the ledger, made by `make_ledger`; its head, locks and draws are beside it.
        budget: what the site may spend over all time.
        unit: whom the budget protects. A budget per image counts plans per patient too: noise that hides all images of
            a patient hides each of them. A budget per patient cannot count plans per image.
        guard: what the ledger is compared with whenever it is read.
    """

    genesis = _GENESIS

    def __init__(
        self,
        path: Path,
        *,
        budget: Budget,
        unit: Unit,
        guard: Guard = Guard(),
    ) -> None:
        self.path = path
        self.budget = budget
        self.unit = unit
        self.draws = path.with_name("draws")
        self._guard = guard
        self._chain = chain.Chain(path, _FORM, self.draws, self)

    def spend(
        self,
        plan_id: str,
        plan_digest: str,
        dataset_digest: str,
        unit: Unit,
        mechanisms: Mapping[PaidKind, Mechanism],
    ) -> LedgerEntry:
        """Debit all that a plan draws; call it before the first noise is drawn.

        The same plan and dataset are debited once: a second call returns the first entry, so a worker that crashed
        after its debit does not pay twice.

        Args:
            plan_id: the plan.
            plan_digest: sha256 of its signed bytes.
            dataset_digest: the digest of the cohort; another dataset is another debit.
            unit: whom the plan's statistics protect.
            mechanisms: all that the plan draws. From here on all of it counts, drawn or not: the decision to skip a
                statistic may depend on earlier ones, so skipping saves nothing.

        Raises:
            BudgetError: the total would go over the budget; nothing was debited.
            LedgerError: the ledger is damaged, or `unit` protects less than this ledger counts.
        """
        check_unit("plan", unit, self.unit)
        with self._locked() as entries:
            entry = _debit_of(entries, plan_digest, dataset_digest)
            if entry is not None:
                # A plan is signed, so that other terms under its digest mean a changed computation, not a new plan.
                _check_same_terms(_as_debit(entry), unit, mechanisms)
                return entry
            self._check_budget(entries, mechanisms)
            debit = Debit(
                number=len(entries) + 1,
                previous=_last_digest(entries),
                at=now_utc(),
                unit=unit,
                plan_id=plan_id,
                plan_digest=plan_digest,
                mechanisms=dict(mechanisms),
                dataset_digest=dataset_digest,
            )
            return self._append(debit)

    def check_affordable(
        self,
        plan_digest: str,
        dataset_digest: str,
        mechanisms: Mapping[PaidKind, Mechanism],
    ) -> None:
        """Refuse a plan that would go over the budget, long before it is debited.

        Args:
            plan_digest: the plan's.
            dataset_digest: the digest of the cohort.
            mechanisms: all that the plan draws; a plan that was debited already is paid for.

        Raises:
            BudgetError: the total would go over the budget; nothing was debited.
            LedgerError: the ledger is damaged.
        """
        with self._locked() as entries:
            if not _debit_of(entries, plan_digest, dataset_digest):
                self._check_budget(entries, mechanisms)

    def record_draw(self, debit: LedgerEntry, kind: PaidKind, draw_digest: str) -> LedgerEntry:
        """Record that `kind` was drawn for `debit`; call it once the draw is durable and before it is used.

        Raises:
            LedgerError: no debit covers it, it was drawn before, or the ledger is damaged.
        """
        with self._locked() as entries:
            paid_kinds: set[PaidKind] = set()
            for entry in _debit_entries(entries):
                if entry.digest == debit.digest:
                    paid_kinds.update(_as_debit(entry).mechanisms)
            if kind not in paid_kinds:
                expected = f"a debit of {kind} with digest {debit.digest[:16]} in this ledger"
                raise LedgerError("draw", expected=expected, got="no such debit")
            # Two draws of one statistic halve its noise, so that the debit would state too little.
            if _draw_of(entries, debit, kind) is not None:
                expected = f"one draw of {kind} for one debit"
                raise LedgerError("draw", expected=expected, got="a second draw")
            draw = NoiseDraw(
                number=len(entries) + 1,
                previous=_last_digest(entries),
                at=now_utc(),
                debit=debit.digest,
                kind=kind,
                draw_digest=draw_digest,
            )
            return self._append(draw)

    def debit_of(self, plan_digest: str, dataset_digest: str) -> LedgerEntry | None:
        """Return the debit of a plan on a data set, None where there is none."""
        with self._locked() as entries:
            return _debit_of(entries, plan_digest, dataset_digest)

    def draw_of(self, debit: LedgerEntry, kind: PaidKind) -> str | None:
        """Return the digest of what was drawn of `kind` for `debit`, or None if nothing was."""
        with self._locked() as entries:
            return _draw_of(entries, debit, kind)

    def has_drawn(self, draw_digest: str) -> bool:
        """Whether the ledger records a draw with this digest."""
        draws = _draws(self.entries)
        return any(draw.draw_digest == draw_digest for draw in draws)

    def verify(self) -> None:
        """Check every line, the chain and the head.

        Raises:
            LedgerError: a line was edited, removed or added, or the head was replaced.
        """
        with self._locked():
            pass

    @property
    def head(self) -> tuple[str, int, tuple[str, ...]]:
        """The last record's digest, the number of records, and every record's digest, oldest first."""
        with self._locked() as entries:
            digests = tuple(entry.digest for entry in entries)
            return _last_digest(entries), len(entries), digests

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every record, oldest first, verified."""
        with self._locked() as entries:
            return entries

    def spent(self, plan_digest: str | None = None) -> tuple[float, float]:
        """Return the (epsilon, delta) of everything spent, or of one plan, at the budget's delta."""
        steps = []
        for debit in _debits(self.entries):
            if plan_digest is None or debit.plan_digest == plan_digest:
                steps.append(_step(debit.mechanisms))
        delta = self.budget.delta
        return adaptive_epsilon(steps, delta), delta

    def left(self) -> float:
        """Return the largest epsilon that a further debit may have, at the share of delta that it would get.

        It is less than the budget minus what was spent, wherever delta was: the last debit so far then gets a smaller
        share of delta, at which it costs more.
        """
        steps = [_step(debit.mechanisms) for debit in _debits(self.entries)]
        # A debit of nothing costs nothing itself.
        without_draws: tuple[Mechanism, ...] = ()
        epsilon = adaptive_epsilon([*steps, without_draws], self.budget.delta)
        return max(self.budget.epsilon - epsilon, 0.0)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Hold the right to draw: between a debit and its draw no other process may draw for it."""
        # A lock of its own: `spend` and `record_draw` take the ledger's lock inside this block, and a process that
        # locks one file twice, through two descriptors, waits for itself for ever.
        with lock_file(self.path.with_suffix(".drawing.lock")):
            yield

    def _check_budget(
        self, entries: tuple[LedgerEntry, ...], mechanisms: Mapping[PaidKind, Mechanism]
    ) -> None:
        # A debit without room for its draws would spend epsilon for statistics that can never be recorded.
        num_draws = len(mechanisms)
        if len(entries) + 1 + num_draws > MAX_RECORDS:
            expected = f"room for a debit and {num_draws} draws within {MAX_RECORDS} records"
            raise LedgerError("ledger", expected=expected, got=f"{len(entries)} records")
        budget = self.budget
        steps = [_step(debit.mechanisms) for debit in _debits(entries)]
        steps.append(_step(mechanisms))
        epsilon = adaptive_epsilon(steps, budget.delta)
        # Not `>`, so that an epsilon that is not a number is refused.
        if not epsilon <= budget.epsilon * _SLACK:
            raise BudgetError(
                "privacy ledger",
                expected=f"epsilon of at most {budget.epsilon:g} at delta {budget.delta:g} in all",
                got=f"{epsilon:.4g} with this plan",
            )

    @contextmanager
    def _locked(self) -> Iterator[tuple[LedgerEntry, ...]]:
        """Hold the ledger for one process at a time, verified, and repaired where that is safe."""
        if not self.draws.is_dir():
            raise LedgerError(
                "ledger",
                expected="the one that `silo init` made",
                got="no folder draws/",
                remedy="Restore it from backup; a new one would forget what was spent.",
            )
        # The anchors are locked first. They are outside the site, so that a copy of the site, which has another ledger
        # file to lock, waits here as well. Each entry is checked against the unit again, since the policy may have
        # changed.
        with self._guard.locked(), self._chain.locked_entries() as entries:
            for debit in _debits(entries):
                check_unit(f"ledger record {debit.number}", debit.unit, self.unit)
            yield entries

    def check(self, digests: Sequence[str]) -> None:
        """Refuse a ledger that was put back, see `silo.privacy.anchor`, and draws that no debit of it pays for."""
        self._guard.hold(_GENESIS, digests)
        # A draw is named by its debit. One that is not in the ledger was paid for in a later copy of the ledger.
        digests_of_records = set(digests)
        for path in self.draws.iterdir():
            # A crash while a draw is written leaves a temporary file, from which nothing was used.
            is_unfinished = path.name.startswith(".")
            debit_digest = path.name.split(".")[0]
            if not is_unfinished and debit_digest not in digests_of_records:
                expected = "a debit in the ledger for each"
                raise LedgerError("draws", expected=expected, got="a draw without a debit")

    def record(self, num_entries: int, head_digest: str) -> None:
        """Note its head in every anchor."""
        self._guard.record(num_entries, head_digest)

    def _append(self, record: Debit | NoiseDraw) -> LedgerEntry:
        return self._chain.append(record)


def make_ledger(path: Path) -> None:
    """Make a ledger where nothing remains of an old one; a crash after any step does no harm.

    Raises:
        LedgerError: part of a ledger is there.
    """
    chain.Chain(path, _FORM, path.with_name("draws")).create()


def _last_digest(entries: tuple[LedgerEntry, ...]) -> str:
    """Return the digest that the next record names as the one before it."""
    if not entries:
        return _GENESIS
    return entries[-1].digest


def _check_same_terms(
    debit: Debit,
    unit: Unit,
    mechanisms: Mapping[PaidKind, Mechanism],
) -> None:
    """Refuse to take a debit for terms that it does not pay for."""
    if debit.unit == unit and are_same_mechanisms(debit.mechanisms, mechanisms):
        return
    paid = describe_mechanisms(debit.unit, debit.mechanisms)
    raise LedgerError(
        "ledger",
        expected=f"{paid}, as first debited for this plan",
        got=describe_mechanisms(unit, mechanisms),
    )


def _debit_entries(entries: tuple[LedgerEntry, ...]) -> Iterator[LedgerEntry]:
    return (entry for entry in entries if isinstance(entry.record, Debit))


def _as_debit(entry: LedgerEntry) -> Debit:
    """Return the record of an entry that is known to be a debit."""
    if not isinstance(entry.record, Debit):
        raise LedgerError("ledger", expected="a debit", got=f"a {entry.record.record}")
    return entry.record


def _debits(entries: tuple[LedgerEntry, ...]) -> Iterator[Debit]:
    return (_as_debit(entry) for entry in _debit_entries(entries))


def _draws(entries: tuple[LedgerEntry, ...]) -> Iterator[NoiseDraw]:
    return (entry.record for entry in entries if isinstance(entry.record, NoiseDraw))


def _debit_of(
    entries: tuple[LedgerEntry, ...],
    plan_digest: str,
    dataset_digest: str,
) -> LedgerEntry | None:
    for entry in _debit_entries(entries):
        debit = _as_debit(entry)
        if debit.plan_digest == plan_digest and debit.dataset_digest == dataset_digest:
            return entry
    return None


def _draw_of(entries: tuple[LedgerEntry, ...], debit: LedgerEntry, kind: PaidKind) -> str | None:
    for draw in _draws(entries):
        if draw.debit == debit.digest and draw.kind == kind:
            return draw.draw_digest
    return None


def _step(mechanisms: Mapping[PaidKind, Mechanism]) -> tuple[Mechanism, ...]:
    """Return the mechanisms of one debit in an order that does not depend on the plan's."""
    # Sums of floating-point numbers depend on their order, and the same debit must always cost the same.
    return tuple(mechanisms[kind] for kind in sorted(mechanisms))
