"""Tables 5, 6, 8 and 9."""

from typing import Any, Literal

from examples.paper.tables.presets import Preset
from examples.paper.tables.rows import FittedRouter, Row, Table
from examples.paper.tables.sources import Experts, Federated, Monolith, Student
from examples.paper.tables.students import QUARTER

STUDENT = "student, own samples"  # a row that the target is of where the next one was not measured
FROM_EXPERT = f"{STUDENT}, from an expert"
LONGER = f"{FROM_EXPERT}, 4 times the steps"
# as is theirs
ONE_SHOT = "one-shot ensemble, lock(1)"
FEDAVG = "FedAvg"
STRATEGIES_OF_ROUTERS = ("full", "lock(.5)")
_GUIDED = ("full", "sample", "lock(1)", "lock(.5)")


def students(preset: Preset) -> Table:
    """Table 5: a distilled student against the monolith at a quarter of the batch."""
    experts = Experts(num=preset.num_islands)

    def distilled(**how: Any) -> Student:
        return Student(
            num=preset.num_islands,
            num_samples=preset.own_samples,
            steps=preset.sampling_steps,
            **how,
        )

    rows = [
        Row(table=5, label="monolith", source=Monolith()),
        Row(table=5, label="monolith, a quarter of the batch", source=Monolith(batch=QUARTER)),
        Row(table=5, label="lock(1)", source=experts),
        Row(table=5, label="full", source=experts, strategy="full"),
        Row(table=5, label=STUDENT, source=distilled()),
        Row(table=5, label=FROM_EXPERT, source=distilled(start="expert")),
        Row(table=5, label=LONGER, source=distilled(start="expert", updates=4)),
        Row(table=5, label="student, own samples, mixture", source=distilled(teacher="mixture")),
        Row(
            table=5,
            label=f"{FROM_EXPERT}, mixture",
            source=distilled(start="expert", teacher="mixture"),
        ),
        Row(table=5, label="student, training images", source=distilled(images="training images")),
    ]
    columns = (
        "fid",
        "fid_pca",
        "kid",
        "precision",
        "recall",
        "evaluations",
        "images_per_s",
        "flops",
    )
    note = (
        "A student has the monolith's network and takes the same number of steps, with a quarter of the batch. The "
        f"{preset.own_samples} own samples are drawn by {preset.sampling_steps} steps of Heun's method, as by `ddm "
        "distill` without data; each is labelled with the expert that drew it. Training images are labelled with their "
        "islands, as in the paper; no federation has these labels. A student from an expert starts from the weights of "
        "the expert with the largest prior, as in `ddm distill`; the others start from random weights. In 4 times the "
        "steps, a student sees the same number of images as the monolith. A student learns the velocity of the expert "
        "that drew the image, or of the mixture. FLOPs are those of the student, of its teachers' forward passes and "
        "of drawing own samples, without the training of the ensemble. Learning rates are chosen with own samples."
    )
    return Table(5, f"Students of {preset.num_islands} experts", columns, rows, note)


def routers(preset: Preset) -> Table:
    """Table 6: router families against epsilon."""
    experts = Experts(num=preset.num_islands, partition="silos")
    known: dict[str, FittedRouter] = {
        "exact counts": FittedRouter(family="counts"),
        "the ensemble's own": FittedRouter(family="own"),
        "labelled training images": FittedRouter(family="labels"),
        "samples": FittedRouter(family="samples"),
        "prior alone": FittedRouter(family="prior"),
    }
    families: tuple[Literal["counts", "learned"], ...] = ("counts", "learned")
    for family in families:
        known |= {
            f"{family}, epsilon {epsilon:g}": FittedRouter(family=family, epsilon=epsilon)
            for epsilon in preset.epsilons
        }
    rows = [
        Row(table=6, label=f"{name}, {strategy}", source=experts, strategy=strategy, router=router)
        for name, router in known.items()
        for strategy in STRATEGIES_OF_ROUTERS
    ]
    columns = (
        "fid",
        "fid_pca",
        "cross_entropy",
        "completion_error",
        "share_error",
        "router_share_error",
    )
    note = (
        f"One ensemble of {preset.num_islands} Dirichlet(0.5) silos is used with each router in turn. The statistics "
        "of a private router may be drawn twice, once for each of its two rows. The silos' own code draws statistics "
        "and debits the ledger, at delta 1e-5, replace-one, per image. Encoder, clusters and sketch use principal "
        "components of public images; the temperature is fitted on held-out public images. `samples` is a transformer "
        "that is trained on images drawn by the experts, so its privacy is that of the weights. `labelled training "
        "images` is a transformer that is trained on the silos' own images, which nobody may collect. Exact counts "
        "have no noise. The ensemble's own router has exact counts too, over more groups, which are fitted on training "
        "images. Cross-entropy and the router's share error are measured on noised test images, against the exact "
        "shares of each class, and averaged over noise levels; routers are chosen by the cross-entropy on validation "
        "images. The completion error is the root mean square error of the right half of "
        f"{preset.completed} test images, drawn from the left half."
    )
    return Table(6, "Router families against epsilon", columns, rows, note)


def federated(preset: Preset) -> Table:
    """Table 8: one model averaged through Flower against the one-shot ensemble of the same silos."""
    experts = Experts(num=preset.num_silos, partition="silos")

    def one(rounds: int = preset.rounds, **how: Any) -> Federated:
        return Federated(num=preset.num_silos, rounds=rounds, **how)

    lost = "one silo lost half-way"
    rows = [
        Row(table=8, label=ONE_SHOT, source=experts),
        Row(table=8, label="one-shot ensemble, sample", source=experts, strategy="sample"),
        Row(table=8, label=f"{ONE_SHOT}, {lost}", source=experts, prior="lost"),
        Row(table=8, label=FEDAVG, source=one()),
        Row(
            table=8,
            label=f"{FEDAVG}, {preset.fewer_rounds} rounds",
            source=one(preset.fewer_rounds),
        ),
        Row(table=8, label="FedProx", source=one(method="fedprox"), best=True),
        Row(table=8, label=f"{FEDAVG}, {lost}", source=one(lost=True)),
    ]
    columns = ("fid", "fid_pca", "kid", "recall", "bytes_up", "bytes_down", "wall_s", "flops")
    note = (
        f"{preset.num_silos} Dirichlet(0.5) silos, at equal training FLOPs. FedAvg and FedProx are Flower's own "
        f"strategies, in {preset.rounds} rounds of a SuperLink and a SuperNode for each silo on loopback. A silo "
        "trains with the library's loop. It keeps nothing between rounds, so every round has a new optimizer and a "
        "short warm-up. The learning rate falls along a cosine over the rounds. In the last round a silo sends weights "
        "that are averaged over its steps. Fewer rounds have a learning rate of their own. FedProx has one for each mu "
        f"({', '.join(f'{mu:g}' for mu in preset.mus)}); the mu that is best on validation images is shown. A relay "
        "counts the bytes that TCP carries between SuperNodes and SuperLink, without TLS. The bytes of the ensemble "
        "are those of one message of Flower, which brings the plan's files to every silo and returns its expert, "
        "signed documents and counts. examples/benchmarks/wire_bytes.py measures a whole federation with its own "
        "transport. Wall time is that of one machine: the silos of a round run at the same time, experts one after the "
        "other, with the router. If a silo is lost, its SuperNode is killed by force after half the rounds. The "
        "ensemble then samples without its expert; its bytes and FLOPs remain those of all silos."
    )
    return Table(
        8, "Federated averaging through Flower against the one-shot ensemble", columns, rows, note
    )


def objectives_and_classes(preset: Preset) -> Table:
    """Table 9: experts that learn different things in one ensemble; and classes, with guidance or without."""
    plain, mixed = (
        Experts(num=preset.num_islands, objectives=which) for which in ("velocity", "mixed")
    )
    conditional = Experts(num=preset.num_islands, partition="silos", conditional=True)
    rows = [
        Row(table=9, label=f"{name}, {strategy}", source=source, strategy=strategy)
        for name, source in (("velocities", plain), ("mixed", mixed))
        for strategy in _GUIDED
    ]
    dense = Monolith(conditional=True)
    for scale in (0.0, *preset.guidance):
        rows += [
            Row(table=9, label=f"classes, g {scale:g}, monolith", source=dense, guidance=scale),
            Row(
                table=9,
                label=f"classes, g {scale:g}, full, exact router (oracle)",
                source=conditional,
                strategy="full",
                router="exact",
                guidance=scale,
            ),
            *(
                Row(
                    table=9,
                    label=f"classes, g {scale:g}, {name}",
                    source=conditional,
                    strategy=name,
                    guidance=scale,
                )
                for name in _GUIDED
            ),
        ]
    columns = ("fid", "fid_pca", "precision", "recall", "agreement", "share_error", "evaluations")
    note = (
        "Mixed experts learn, in turn, the velocity on the linear path, v on cosine_vp, eps on ddpm_linear and x_0 on "
        "edm; their clusters are those of table 1. With classes, silos are Dirichlet(0.5), samples have the class "
        "frequencies of the training images, and agreement is the share of samples in which the classifier recognises "
        "the class. "
        "With guidance g above 0, full follows the guided mixture exactly and the other strategies approximate it; "
        "with g = 0 all are exact."
    )
    return Table(9, "Mixed objectives, and classes with guidance", columns, rows, note)
