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
        "The student is the monolith's network and takes as many steps, of a quarter of its images. Own samples are "
        f"{preset.own_samples}, by {preset.sampling_steps} steps of Heun, each with the expert that drew it, as "
        "`ddm distill` draws them without data; training images have the island that they lie in, as in the paper, "
        "which no federation has. Those from an expert start from the weights of the one with the largest prior, as "
        "`ddm distill` does, the others from random ones; in 4 times the steps a student sees as many images as the "
        "monolith. A student learns the velocity of the expert that drew the image, or of the mixture of all. FLOPs of "
        "a student are its own, those of its teachers' forward passes and those of drawing own samples; training the "
        "ensemble comes on top. Rates are chosen as the others, with own samples."
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
        f"One ensemble of {preset.num_islands} silos, Dirichlet(0.5), with one router after the other; a private one "
        "may be drawn anew for each of its two rows. Statistics are "
        "drawn and paid for by the silos' own code at delta 1e-5, replace-one, per image; encoder, clusters and sketch "
        "are fitted on public images, as principal components, and a temperature on held-out public ones. Samples is a "
        "transformer on images that the experts draw, as private as their weights; labelled training images is one on "
        "the silos' own, which nobody may collect; exact counts are without noise, and so are those of the ensemble's "
        "own router, over more groups, which are fitted on training images. Cross-entropy and the router's "
        "share error are of noised test images, against each class's exact shares, averaged over noise levels, and "
        "routers are chosen by that of validation images; the "
        f"completion error is the root mean square of the right half of {preset.completed} test images, drawn given "
        "the left half."
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
        f"{preset.num_silos} silos, Dirichlet(0.5), at equal training FLOPs. FedAvg and FedProx are Flower's own "
        f"strategies in {preset.rounds} rounds of a SuperLink and a SuperNode for each silo on loopback; a silo trains "
        "by the library's loop, with a new optimizer and a short warm-up in every round, as silos without a memory do, "
        "the rate falling along a cosine over the rounds, and sends weights averaged over its steps in the last round. "
        "Fewer rounds have a rate of their own, and so has FedProx for each mu "
        f"({', '.join(f'{mu:g}' for mu in preset.mus)}), of which the best on validation images is taken. "
        "Bytes are what TCP carried between SuperNodes and SuperLink, counted by a relay, without TLS. "
        "The ensemble's are those of one message of Flower's that takes the plan's files to every silo and brings back "
        "expert, signed documents and counts; a whole federation with its own transport is in "
        "examples/benchmarks/wire_bytes.py. Seconds are on one machine: silos of a round beside each other, experts "
        "one after the other, router included. The lost silo's SuperNode is killed by force after half the rounds; "
        "the ensemble goes on without its expert, "
        "and its bytes and FLOPs are those of all silos."
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
        "edm; clusters as in table 1. With classes, silos are Dirichlet(0.5), samples are asked for as frequently "
        "as the classes of the training images, and agreement is the share in which the classifier finds the class. "
        "With guidance g above 0, full follows the guided mixture exactly and the other strategies approximate it; "
        "with g = 0 all are exact."
    )
    return Table(9, "Mixed objectives, and classes with guidance", columns, rows, note)
