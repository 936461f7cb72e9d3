"""Table 11: what joining brings, with and without a shared base."""

from examples.paper.tables.data import CONCENTRATION
from examples.paper.tables.presets import Preset
from examples.paper.tables.rows import Row, Table
from examples.paper.tables.sources import (
    PUBLIC_BASE,
    Experts,
    Federated,
    FirstRound,
    Monolith,
    SiloImages,
)

JOINING = 11
RANDOM = "random weights"
PUBLIC = "the public base"
LARGEST = "the largest silo's expert"
LONGER = "the largest silo's expert, trained longer"
SMALLEST = "the smallest silo's expert"
SECOND = "the best expert of a first round"
SMALLER = "random weights, in smaller batches"
FEWER_CLASSES = 0.1  # concentration of the silos that differ more


def pooled(start: str) -> str:
    """Name the row of one model of all images."""
    return f"pooled, from {start}"


BEST_POOLED = "pooled, the best batch, from random weights"
ISLANDS = "one owner: islands of clusters, from random weights"
SEEDED = "one owner: islands of clusters, from a seed inside the budget"
_SEED_SHARE = 0.25
_LONGER_SHARE = 0.75  # of the operations, chosen on validation images with `_SMALLER_BATCHES`
_SMALLER_BATCHES = 4  # with which islands of clusters and one model are best, see table 1


def ensemble(concentration: float, start: str, *, whole: bool = False) -> str:
    """Name the row of an ensemble of silos."""
    budget = "whole budgets" if whole else "equal FLOPs"
    return f"Dirichlet {concentration:g}, {budget}: ensemble, from {start}"


def merged(concentration: float, start: str) -> str:
    """Name the row of the mean of the experts' weights."""
    return (
        f"Dirichlet {concentration:g}, equal FLOPs: averaged weights of the experts, from {start}"
    )


def averaging(concentration: float, rounds: int, start: str) -> str:
    """Name the row of federated averaging over the same silos."""
    return f"Dirichlet {concentration:g}, equal FLOPs: FedAvg, {rounds} rounds, from {start}"


def joining(preset: Preset, num_classes: int | None = None) -> Table:
    """Table 11: silos alone and together, federated averaging and pooled training, by where training starts.

    Args:
        preset: the sizes.
        num_classes: of the data set. With fewer classes than silos, `FEWER_CLASSES` would leave silos without an
            image, and is left out; None leaves nothing out.
    """
    concentrations = [CONCENTRATION, FEWER_CLASSES]
    left_out = ""
    if num_classes is not None and num_classes < preset.num_islands:
        concentrations = [CONCENTRATION]
        left_out = (
            f" Dirichlet {FEWER_CLASSES:g} is left out: with {num_classes} classes, some silos would have no image, "
            "or too few to train."
        )
    rows = [
        Row(table=JOINING, label=pooled(RANDOM), source=Monolith()),
        Row(table=JOINING, label=pooled(PUBLIC), source=Monolith(start=PUBLIC_BASE)),
    ]
    for concentration in concentrations:
        rows += _equal_flops(preset, concentration)
        rows += _whole_budgets(preset, concentration)
    rows += _further(preset)
    rows += _one_owner(preset)
    columns = (
        "fid",
        "recall",
        "alone_fid",
        "own_fid",
        "joint_own_fid",
        "smallest_own_fid",
        "rounds",
        "bytes",
        "start_flops",
    )
    note = (
        f"{preset.num_islands} silos divide every class by a draw of a Dirichlet distribution. FID and recall compare "
        "the samples of the ensemble (lock(1)), or of the one model, with all test images. *Alone* is the mean FID of "
        "the silos' single experts against all test images. *Own* is the mean FID of these experts against test images "
        "with the silo's own mix of classes. *Together, own* compares these with samples of the ensemble, which have "
        "the mix of all silos. All three are measured for silos with whole budgets. Silos with fewer such "
        "images than four times the number of the classifier's features (256) are left out of *own*, since FID against "
        "so few images is far too high. The smallest silo then has no figure of its own. At equal FLOPs, all silos "
        "together take the operations of the pooled model. If the base comes from within the federation, half of these "
        "operations train the base, on the images of one silo or in a first round, and half train the experts; a base "
        "that is trained longer takes three quarters, in a quarter of the batch and four times the steps. With "
        "whole budgets, every silo takes the operations of the pooled model, and a base from within takes the same "
        "number again. The public base is trained on images that no silo has, with the operations of the pooled "
        "model; only the column *FLOPs of the base* counts them. In Fashion-MNIST these are public "
        "images of three classes (trousers, sneakers and bags). Learning rates of models that "
        "start from a base were chosen for silos that start from the public base. FedAvg runs in one process with "
        "Flower's mean. Its bytes, and those of the ensemble, are those of the weights, without messages and "
        "documents; table 8 counts bytes on the wire. Islands of one owner are feature clusters with a quarter of the "
        f"batch and four times the steps. A seed takes {_SEED_SHARE:g} of the operations, on all images; the islands "
        "take the others. *Averaged weights* are one network, the mean of the experts by their shares of the images. "
        "*In smaller batches* also means a quarter of the batch and four times the steps. The best batch of the pooled "
        "model was chosen on validation images."
    )
    return Table(JOINING, "What joining brings", columns, rows, note + left_out)


def _equal_flops(preset: Preset, concentration: float) -> list[Row]:
    half = 0.5
    silos = Experts(num=preset.num_islands, partition="silos", concentration=concentration)
    second_half = silos.model_copy(update={"budget": half})
    sources = {
        RANDOM: silos,
        PUBLIC: silos.model_copy(update={"start": PUBLIC_BASE}),
        LARGEST: second_half.model_copy(
            update={"start": _expert_of(preset, concentration, "largest", half)}
        ),
        LONGER: silos.model_copy(
            update={
                "budget": 1 - _LONGER_SHARE,
                "start": _expert_of(
                    preset, concentration, "largest", _LONGER_SHARE, updates=_SMALLER_BATCHES
                ),
            }
        ),
        SMALLEST: second_half.model_copy(
            update={"start": _expert_of(preset, concentration, "smallest", half)}
        ),
        SECOND: second_half.model_copy(update={"start": FirstRound(experts=second_half)}),
    }
    rows = [
        Row(table=JOINING, label=ensemble(concentration, start), source=source)
        for start, source in sources.items()
    ]
    for rounds in (preset.rounds, preset.fewer_rounds):
        for start, base in ((RANDOM, None), (PUBLIC, PUBLIC_BASE)):
            source = Federated(
                num=preset.num_islands,
                rounds=rounds,
                concentration=concentration,
                in_process=True,
                start=base,
            )
            label = averaging(concentration, rounds, start)
            rows.append(Row(table=JOINING, label=label, source=source))
    return rows


def _further(preset: Preset) -> list[Row]:
    """Rows of overlapping silos alone, which answer what the others leave open."""
    silos = Experts(num=preset.num_islands, partition="silos")
    whole = silos.model_copy(update={"whole": True})
    averaged = Federated(
        num=preset.num_islands,
        rounds=preset.rounds,
        in_process=True,
        budget=0.5,
        start=_expert_of(preset, CONCENTRATION, "largest", 0.5),
    )
    sources: dict[str, Experts | Federated] = {
        # The base that is trained longer takes smaller batches too.
        ensemble(CONCENTRATION, SMALLER): silos.model_copy(update={"updates": _SMALLER_BATCHES}),
        averaging(CONCENTRATION, preset.rounds, LARGEST): averaged,
        ensemble(CONCENTRATION, SECOND, whole=True): whole.model_copy(
            update={"start": FirstRound(experts=whole)}
        ),
    }
    rows = [Row(table=JOINING, label=label, source=source) for label, source in sources.items()]
    of_start = {row.label: row.source for row in _equal_flops(preset, CONCENTRATION)}
    for start in (RANDOM, PUBLIC, LARGEST, LONGER):
        source = of_start[ensemble(CONCENTRATION, start)]
        label = merged(CONCENTRATION, start)
        rows.append(Row(table=JOINING, label=label, source=source, merged=True))
    return rows


def _one_owner(preset: Preset) -> list[Row]:
    """Rows of one owner, who has all images: equal operations in all, those of the seed included."""
    seed = Monolith(budget=_SEED_SHARE, updates=_SMALLER_BATCHES)
    islands = Experts(num=preset.num_islands, updates=_SMALLER_BATCHES)
    seeded = islands.model_copy(update={"budget": 1 - _SEED_SHARE, "start": seed})
    return [
        Row(table=JOINING, label=BEST_POOLED, source=Monolith(), best=True),
        Row(table=JOINING, label=ISLANDS, source=islands),
        Row(table=JOINING, label=SEEDED, source=seeded),
    ]


def _whole_budgets(preset: Preset, concentration: float) -> list[Row]:
    silos = Experts(
        num=preset.num_islands, partition="silos", concentration=concentration, whole=True
    )
    starts = {
        RANDOM: None,
        PUBLIC: PUBLIC_BASE,
        LARGEST: _expert_of(preset, concentration, "largest", 1.0),
    }
    return [
        Row(
            table=JOINING,
            label=ensemble(concentration, start, whole=True),
            source=silos.model_copy(update={"start": base}),
        )
        for start, base in starts.items()
    ]


def _expert_of(
    preset: Preset, concentration: float, silo: str, budget: float, *, updates: int = 1
) -> Monolith:
    images = SiloImages.model_validate(
        {"num": preset.num_islands, "concentration": concentration, "silo": silo}
    )
    return Monolith(images=images, budget=budget, updates=updates)
