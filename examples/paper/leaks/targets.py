"""The targets of the table of what experts remember, over its seeds."""

from collections.abc import Sequence
from dataclasses import replace

from examples.paper.leaks.cells import LeakCell
from examples.paper.leaks.choices import CHOICES
from examples.paper.tables.results import spread
from examples.paper.tables.targets import TableTarget, target_of

NUM_IMAGES = 1000
_FROM_SCRATCH = "random"
_WAYS = tuple(
    name for name, choice in CHOICES.items() if choice.from_base and choice.epsilon is None
)
_PRIVATE_WAYS = ("base-8", "lora-8")
_MOST_RATIO = 1.5
_MOST_PRIVATE_FID = 109.0  # a third of 328, without a base of related images
_PASS = "pass"


def leak_targets(cells: Sequence[LeakCell]) -> list[TableTarget]:
    """Return the targets of silos of 1,000 images; those that were not measured without a value."""
    by_choice: dict[str, dict[int, LeakCell]] = {}
    for cell in cells:
        if cell.images == NUM_IMAGES:
            by_choice.setdefault(cell.choice, {})[cell.seed] = cell
    return [_audited(by_choice), _private(by_choice)]


def _audited(by_choice: dict[str, dict[int, LeakCell]]) -> TableTarget:
    figure = (
        f"FID of {NUM_IMAGES:,} images from a base, the best training whose audits all pass, "
        "over that of full training from random weights"
    )
    target = f"at most {_MOST_RATIO:g}"
    random = by_choice.get(_FROM_SCRATCH, {})
    measured = {choice: by_choice[choice] for choice in _WAYS if choice in by_choice}
    passing = {
        choice: by_seed
        for choice, by_seed in measured.items()
        if all(cell.verdict == _PASS for cell in by_seed.values())
    }
    best = _best(passing)
    if best is None:
        result = TableTarget(figure, target)
        if measured:
            result = replace(result, met="no", note="no training passes with every seed")
        return result
    seeds = sorted(passing[best].keys() & random.keys())
    pairs = [(passing[best][seed], random[seed]) for seed in seeds]
    ratios = [_fid(over) / _fid(under) for over, under in pairs]
    used = [cell for pair in pairs for cell in pair]
    return target_of(figure, target, ratios, _MOST_RATIO, used, best)


def _private(by_choice: dict[str, dict[int, LeakCell]]) -> TableTarget:
    figure = (
        f"FID with DP-SGD at epsilon 8, {NUM_IMAGES:,} images from a base of related images, "
        "the better of all weights and LoRA"
    )
    target = f"at most {_MOST_PRIVATE_FID:g}"
    best = _best({choice: by_choice[choice] for choice in _PRIVATE_WAYS if choice in by_choice})
    if best is None:
        return TableTarget(figure, target)
    used = list(by_choice[best].values())
    return target_of(figure, target, [_fid(cell) for cell in used], _MOST_PRIVATE_FID, used, best)


def _best(by_choice: dict[str, dict[int, LeakCell]]) -> str | None:
    """Return the choice with the lowest mean FID."""
    mean = {
        choice: spread([_fid(cell) for cell in by_seed.values()], as_ratios=True)[0]
        for choice, by_seed in by_choice.items()
    }
    return min(mean, key=lambda choice: mean[choice], default=None)


def _fid(cell: LeakCell) -> float:
    return cell.figures["fid"].value
