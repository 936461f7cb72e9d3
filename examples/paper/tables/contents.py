"""What the tables hold: every row as plain data, from which a model is trained and samples are drawn."""

from collections.abc import Mapping
from functools import partial

from ddm.diffusion.solver import SolverName
from examples.paper.tables.further import federated, objectives_and_classes, routers, students
from examples.paper.tables.joining import joining
from examples.paper.tables.presets import Preset
from examples.paper.tables.rows import BEST_BATCH, FORMER, STRATEGIES, UNTUNED, Row, Table
from examples.paper.tables.sources import Experts, Monolith, Partition, TrainingImages

_EVALUATIONS: Mapping[SolverName, int] = {
    "euler": 1,
    "heun": 2,
    "midpoint": 2,
    "rk4": 4,
    "dpm": 1,
}


def tables(preset: Preset, num_classes: int | None = None) -> dict[int, Table]:
    """Return all tables, by number.

    Args:
        preset: the sizes.
        num_classes: of the data set, which leaves out what cannot be made with so few; None leaves nothing out.
    """
    builders = (
        _strategies,
        _numbers,
        _partitions,
        _budgets,
        students,
        routers,
        _unequal,
        federated,
        objectives_and_classes,
        _solvers,
        partial(joining, num_classes=num_classes),
    )
    return {table.number: table for table in (make(preset) for make in builders)}


def _strategies(preset: Preset) -> Table:
    experts = Experts(num=preset.num_islands)
    batch = preset.batch_size
    rows = [
        Row(table=1, label="training images (floor)", source=TrainingImages()),
        Row(table=1, label="monolith", source=Monolith()),
        *(
            Row(table=1, label=f"monolith, batch {batch // times}", source=Monolith(updates=times))
            for times in preset.updates
        ),
        Row(table=1, label=UNTUNED, source=Monolith(tuned=False)),
        Row(table=1, label=FORMER, source=Monolith(recipe="former")),
        Row(
            table=1,
            label="sample, exact router (oracle)",
            source=experts,
            strategy="sample",
            router="exact",
        ),
        *(Row(table=1, label=name, source=experts, strategy=name) for name in STRATEGIES),
        *(
            Row(
                table=1,
                label=f"lock(1), batch {batch // preset.num_islands // times}",
                source=experts.model_copy(update={"updates": times}),
            )
            for times in preset.expert_updates
        ),
    ]
    columns = (
        "fid",
        "fid_pca",
        "kid",
        "precision",
        "recall",
        "share_error",
        "share_error_images",
        "evaluations",
        "images_per_s",
    )
    note = (
        "Monoliths with smaller batches take more steps, so that the FLOPs are equal; every batch has a learning rate "
        f"of its own. The experts together have {preset.num_islands} times the monolith's weights; lock, sample and "
        "top-1 evaluate one expert at a time. Routers are fitted on exact counts, without differential privacy. FLOPs "
        "do not include the choice of learning rates, the encoder and the clustering. The share error is the total "
        "variation distance between the priors of the experts and their shares of the samples. If experts are mixed, a "
        "sample counts for one expert, drawn from the router's weights at the last step. The share error of images "
        "compares the clusters of the samples instead, by the principal components that divide the training images."
    )
    return Table(
        1,
        f"Strategies of {preset.num_islands} experts at equal training FLOPs",
        columns,
        rows,
        note,
    )


def _numbers(preset: Preset) -> Table:
    rows = [Row(table=2, label="1 (monolith)", source=Monolith())]
    for num in sorted((*preset.other_islands, preset.num_islands)):
        rows += [
            Row(table=2, label=f"{num}, {name}", source=Experts(num=num), strategy=name)
            for name in ("lock(1)", "sample")
        ]
    note = "Every number of experts has a learning rate of its own, chosen in the same way and among the same rates."
    return Table(
        2,
        "Number of experts at equal training FLOPs",
        ("fid", "fid_pca", "kid", "recall"),
        rows,
        note,
    )


def _partitions(preset: Preset) -> Table:
    ways: Mapping[Partition, str] = {
        "clusters": "feature clusters",
        "random": "random",
        "silos": "Dirichlet silos",
    }
    rows = [Row(table=3, label="monolith", source=Monolith())]
    for way, name in ways.items():
        experts = Experts(num=preset.num_islands, partition=way)
        rows += [
            Row(table=3, label=f"{name}, {strategy}", source=experts, strategy=strategy)
            for strategy in ("lock(1)", "lock(.5)", "sample", "top-1")
        ]
    columns = ("fid", "fid_pca", "kid", "recall", "share_error")
    note = (
        "Each random expert has an equal part of all images. Dirichlet silos divide every class by a draw of "
        "Dirichlet(0.5), so that silos share classes and differ in size. Every expert takes the same FLOPs."
    )
    return Table(3, f"Partition among {preset.num_islands} experts", columns, rows, note)


def _budgets(preset: Preset) -> Table:
    rows = []
    for budget in (*preset.budgets, 1.0):
        experts = Experts(num=preset.num_islands, budget=budget)
        for how in ("", BEST_BATCH):
            names: dict[str, Monolith | Experts] = {
                "monolith": Monolith(budget=budget),
                "lock(1)": experts,
            }
            rows += [
                Row(table=4, label=f"{name}{how}, budget {budget:g}", source=source, best=bool(how))
                for name, source in names.items()
            ]
    note = (
        "The best batch is chosen from those of table 1 together with its learning rate, on validation images, for "
        "monolith and experts alike. The choice is made once, in short runs with one seed, and serves for all budgets. "
        "A smaller batch has more steps, so that the FLOPs are equal. Batches smaller than those of table 1 were not "
        "tried."
    )
    return Table(4, "FID by training FLOPs", ("fid", "fid_pca", "kid", "flops"), rows, note)


def _unequal(preset: Preset) -> Table:
    experts = Experts(num=4, partition="unequal")
    rows = [Row(table=7, label="monolith", source=Monolith())]
    rows += [
        Row(table=7, label=name, source=experts, strategy=name)
        for name in (
            "full",
            "sample",
            "lock(1)",
            "lock(.5)",
            "top-1",
            "top-2",
            "nucleus(.9)",
            "threshold(.1)",
        )
    ]
    rows += [
        Row(table=7, label=f"{name}, equal prior", source=experts, strategy=name, prior="equal")
        for name in ("lock(1)", "sample", "top-1")
    ]
    columns = ("fid", "share_error", "smallest_followed", "smallest_drawn", "smallest_recall")
    note = (
        "Silos are cut along the first principal component of the public images, so that the silo of a sample is "
        "known. Every expert takes a quarter of the FLOPs, whatever the share of its silo. The dotted line is the "
        "share of the smallest silo. Equal priors are set after training. Their shares differ from those of the test "
        "images, and FID counts this difference as an error."
    )
    return Table(7, "Silos of .7, .2, .08 and .02 of the images", columns, rows, note)


def _solvers(preset: Preset) -> Table:
    experts = Experts(num=preset.num_islands)
    rows = [
        Row(
            table=10,
            label=f"{strategy}, {solver}, {evaluations}",
            source=experts,
            strategy=strategy,
            solver=solver,
            steps=evaluations // evaluations_of_step,
        )
        for strategy in ("lock(1)", "sample")
        for solver, evaluations_of_step in _EVALUATIONS.items()
        for evaluations in preset.solver_evaluations
        if evaluations >= evaluations_of_step
    ]
    return Table(10, "Solvers by evaluations a sample", ("fid", "kid", "evaluations"), rows)
