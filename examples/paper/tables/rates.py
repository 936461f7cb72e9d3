"""How learning rates, batches and FedProx's weight are chosen on validation images, and what is tuned as what."""

from collections.abc import Callable, Mapping
from math import inf
from typing import TypeGuard

from ddm.errors import NumericalError
from ddm.protocol.architecture import RATE_TIMES_WIDTH
from examples.paper.tables.data import CONCENTRATION
from examples.paper.tables.models import FORMER
from examples.paper.tables.presets import Preset
from examples.paper.tables.results import Cost, RateChoice
from examples.paper.tables.rows import Row
from examples.paper.tables.sources import (
    PUBLIC_BASE,
    Experts,
    Federated,
    FirstRound,
    Monolith,
    Student,
    Trained,
    TrainingImages,
)

_MOST_BEYOND = 2  # rates beyond those of the preset


def kind_of(source: Trained, preset: Preset) -> str:
    """Name the models that share a rate with this one."""
    batch = preset.batch_size // getattr(source, "updates", 1)
    if isinstance(source, Experts) and source.whole:
        # Every silo trains as a monolith does.
        start = PUBLIC_BASE if source.start else None
        return kind_of(Monolith(start=start), preset)
    if _is_seeded(source):
        return f"islands, batch {batch // source.num}, from a seed"
    if _start_of(source) is not None:
        rounds = f", {source.rounds} rounds" if isinstance(source, Federated) else ""
        return f"{source.kind}{rounds}, from a base"
    if isinstance(source, Federated) and source.in_process:
        return f"{source.kind}, {source.num} silos, {source.rounds} rounds"
    if isinstance(source, Experts):
        if source.num != preset.num_islands:
            return f"{source.num} experts"
        return "experts" if source.updates == 1 else f"experts, batch {batch // source.num}"
    if isinstance(source, Federated):
        rounds = "" if source.rounds == preset.rounds else f", {source.rounds} rounds"
        return source.kind + rounds + (f", mu {source.mu:g}" if source.mu else "")
    if isinstance(source, Student):
        return source.kind if source.start == "random" else f"{source.kind}, from an {source.start}"
    if source.recipe == "former" or not source.tuned:
        return "monolith, former recipe" if source.recipe == "former" else "monolith, default rate"
    if source.updates != 1:
        return f"monolith, batch {batch}"
    return "monolith" if source.batch == 1.0 else f"monolith, batch x {source.batch:g}"


def _start_of(source: Trained) -> Monolith | FirstRound | None:
    if isinstance(source, Student):
        return None
    return source.start


def _is_seeded(source: Trained) -> TypeGuard[Experts]:
    """Whether these are islands of one owner that start from a seed."""
    is_of_islands = isinstance(source, Experts) and source.partition == "clusters"
    return is_of_islands and _start_of(source) is not None


def tuned_as(source: Trained, preset: Preset) -> Trained:
    """Return the model whose rate others of its kind take: unconditional, of clusters, of a smaller budget.

    Those that start from a base take the rate of silos that start from the public base, and islands that start from a
    seed that of a shorter training from the same seed.
    """
    if _is_seeded(source):
        return source.model_copy(update={"budget": preset.tuning * source.budget})
    start = PUBLIC_BASE if _start_of(source) else None
    if isinstance(source, Experts) and source.whole:
        return Monolith(budget=preset.tuning, start=start)
    if isinstance(source, Experts) and start:
        return Experts(budget=preset.tuning, num=source.num, partition="silos", start=start)
    if isinstance(source, Monolith):
        return Monolith(
            budget=preset.tuning, batch=source.batch, updates=source.updates, start=start
        )
    if isinstance(source, Federated):
        rounds = max(1, round(preset.tuning * source.rounds))
        return source.model_copy(
            update={
                "budget": preset.tuning,
                "rounds": rounds,
                "lost": False,
                "concentration": CONCENTRATION,
                "start": start,
            }
        )
    if isinstance(source, Student):
        plain = {"budget": preset.tuning, "images": "own samples", "teacher": "label", "updates": 1}
        return source.model_copy(update=plain)
    return Experts(budget=preset.tuning, num=source.num, updates=source.updates)


def only_rate(source: Trained, preset: Preset) -> RateChoice | None:
    """Return the rate of a model where nothing is to be chosen; else None.

    A preset with one rate leaves nothing; the former recipe has a rate of its own, and what is not tuned that of plans
    which name none.
    """
    if isinstance(source, Monolith) and source.recipe == "former":
        return RateChoice(rate=FORMER.training.learning_rate, tried={}, steps=0)
    if len(preset.rates) == 1 or (isinstance(source, Monolith) and not source.tuned):
        return RateChoice(rate=RATE_TIMES_WIDTH / preset.network.hidden, tried={}, steps=0)
    return None


def best_rate(
    preset: Preset, judge: str, measure: Callable[[float], tuple[float, Cost]]
) -> RateChoice:
    """Try the preset's rates, and further ones while the best is the lowest or the highest; see `RateChoice.trains`.

    Args:
        preset: holds the rates.
        judge: digest of the classifier.
        measure: trains at a rate, and returns FID and cost; raises NumericalError where training diverges.
    """
    tried: dict[float, float] = {}
    costs: list[Cost] = []

    def attempt(rate: float) -> None:
        try:
            tried[rate], cost = measure(rate)
            costs.append(cost)
        except NumericalError:
            tried[rate] = inf

    for times_width in preset.rates:
        attempt(times_width / preset.network.hidden)
    for _ in range(_MOST_BEYOND):
        if (beyond := rate_beyond(tried)) is None:
            break
        attempt(beyond)
    shown = {f"{rate:.3g}": None if fid == inf else fid for rate, fid in sorted(tried.items())}
    best = min(tried, key=lambda rate: tried[rate])
    return RateChoice(rate=best, tried=shown, steps=costs[0].steps if costs else 0, judge=judge)


def rate_beyond(tried: Mapping[float, float]) -> float | None:
    """Return twice the highest rate where that is the best so far, half the lowest where that is; else None.

    Args:
        tried: the FID by rate, infinite where training diverged.
    """
    best = min(tried, key=lambda rate: tried[rate])
    if tried[best] == inf or min(tried) < best < max(tried):
        return None
    return best / 2 if best == min(tried) else 2 * best


def candidates(row: Row, preset: Preset) -> list[Trained]:
    """Return the models of a row whose rates are chosen before it is measured: its own, or one for each choice."""
    source = row.source
    if isinstance(source, TrainingImages):
        return []
    if row.best and isinstance(source, Federated):
        return [source.model_copy(update={"mu": mu}) for mu in preset.mus]
    if not row.best or isinstance(source, Student | Federated):
        return [source]
    more = preset.updates if isinstance(source, Monolith) else preset.expert_updates
    return [source.model_copy(update={"updates": times}) for times in (1, *more)]


def settled(
    row: Row, preset: Preset, choice_of: Callable[[Trained], RateChoice | None]
) -> Row | None:
    """Return a row with the batch, or the weight of FedProx's term, that is best on validation images.

    None where a choice of the rate is missing, or where different classifiers judged them.
    """
    if not row.best:
        return row
    if len(options := candidates(row, preset)) == 1:
        return row.model_copy(update={"source": options[0], "best": False})
    lowest: list[float] = []
    judges = set()
    for source in options:
        if (choice := choice_of(source)) is None:
            return None
        judges.add(choice.judge)
        lowest.append(min((fid for fid in choice.tried.values() if fid is not None), default=inf))
    if len(judges) > 1:
        return None
    return row.model_copy(update={"source": options[lowest.index(min(lowest))], "best": False})
