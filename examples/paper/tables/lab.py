"""Measures rows: chooses rates, finds or trains the models, draws samples and judges them; keeps every cell."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from pathlib import Path

import torch
from torch import Tensor

from aggregator.planning.released_base import MAX_COMPARED_IMAGES, velocity_loss
from ddm.diffusion.path import path_named
from ddm.ensemble import Ensemble
from ddm.errors import NumericalError
from ddm.evaluation.shares import share_error
from ddm.protocol.base import sha256_hex
from ddm.routers.calibration import Calibrated
from ddm.sampling.samples import Samples
from ddm.system.console import say
from examples.paper.tables.averaging import averaged, averaged_in_process, wire
from examples.paper.tables.clock import Clock
from examples.paper.tables.data import World
from examples.paper.tables.drawing import classes_of, drawn, prepared, prior_of
from examples.paper.tables.ensembles import experts, island_of, islands_of
from examples.paper.tables.fitted import Routers, completion_error, with_router
from examples.paper.tables.joining import JOINING
from examples.paper.tables.judging import Judge, clipped
from examples.paper.tables.models import Made, Weights, Workshop, monolith, weights_of
from examples.paper.tables.presets import Preset
from examples.paper.tables.published import Published
from examples.paper.tables.rates import best_rate, kind_of, only_rate, settled, tuned_as
from examples.paper.tables.results import (
    Cell,
    Cost,
    Document,
    Figure,
    Kept,
    RateChoice,
    commit,
    hardware,
    utc,
)
from examples.paper.tables.rows import STRATEGIES, FittedRouter, Row
from examples.paper.tables.sharing import alone
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
from examples.paper.tables.students import student

_VERSION = 2  # of all that figures mean; whoever changes that raises it, and nothing measured before is used again
_TUNING_SEED = 1000  # none of the seeds that are reported
_SILOS = 7  # the table whose rows say what becomes of the smallest silo
_WIRE = 8  # the one whose rows say what travels
# what models depend on
_TRAINING = {
    "network",
    "num_steps",
    "batch_size",
    "router",
    "transformer",
    "fit_images",
    "pca_dim",
    "num_islands",
}


@dataclass(frozen=True)
class Lab:
    """Everything at hand.

    Attributes:
        world: the data set.
        preset: the sizes.
        out: the folder of everything.
        judge: judges samples.
        clock: says when to stop.
        published: what an earlier run measured.
        at_hand: the model that was used last, by its name.
        routers: those for the ensemble that was used last.
    """

    world: World
    preset: Preset
    out: Path
    judge: Judge
    clock: Clock
    published: Published = Published()
    at_hand: dict[str, Made] = field(default_factory=dict)
    routers: list[Routers] = field(default_factory=list)

    @property
    def kept(self) -> Kept:
        """What was measured before."""
        return Kept(self.out / "cells")

    @property
    def workshop(self) -> Workshop:
        """Where models are trained."""
        return Workshop(self.world, self.preset, self.out / "models", self.clock)

    def _key(self, *parts: object) -> tuple[object, ...]:
        """Name what every figure depends on, and these parts."""
        version, name, num, preset = depends_on(self.world, self.preset)
        return (version, name, num, self.judge.about.digest, preset, *parts)

    def cell(self, row: Row, seed: int) -> Cell:
        """Return a row's figures for a seed, measured now unless they are there.

        Raises:
            BusyError: another process measures it, or trains the model that it needs.
        """
        row = (
            settled(row, self.preset, self.rate) or settled(row, self.preset, self._own_rate) or row
        )
        if found := self.published.cell(row.table, row.label, seed, self.judge.about):
            return found

        def measure() -> Cell:
            self.clock.check()
            cell = self._measured(row, seed)
            say(f"table {row.table}, seed {seed}, {row.label}: FID {cell.figures['fid'].value:.1f}")
            return cell

        return self._once(self.key(row, seed), partial(self._kept_cell, row, seed), measure)

    def _kept_cell(self, row: Row, seed: int) -> Cell | None:
        """Return a row's cell, unless its model was trained at another rate than the one that is chosen now.

        One that lacks figures of the row's table is not returned either: it is measured again.
        """
        cell = self.kept.read(self.key(row, seed), Cell)
        if cell is None or self._lacks_figures(cell, row, seed):
            return None
        if cell.cost is None or isinstance(row.source, TrainingImages):
            return cell
        chosen = self.chosen(row.source)
        return (
            cell if chosen and isclose(chosen.rate, cell.cost.learning_rate, rel_tol=1e-4) else None
        )

    def _lacks_figures(self, cell: Cell, row: Row, seed: int) -> bool:
        """Whether a cell is of the same row of another table, or from before small silos were left out."""
        source = row.source
        if row.table != JOINING:
            return False
        if isinstance(source, Federated):
            return "rounds" not in cell.figures
        if not isinstance(source, Experts) or source.partition != "silos":
            return False
        if "rounds" not in cell.figures:
            return True
        # Without a silo that is too small, the figures from before are the same.
        return (
            source.whole
            and "own_silos" not in cell.figures
            and len(self._own_references(source, seed)) < source.num
        )

    def _once(
        self, key: object, read: Callable[[], Document | None], make: Callable[[], Document]
    ) -> Document:
        """Return what is kept under a key, or make it as the only process that does."""
        if (value := read()) is None:
            with alone(self.out, self.kept.file(key).stem):
                if (value := read()) is None:  # another process may have been a moment earlier
                    value = make()
                    self.kept.write(key, value)
        return value

    def key(self, row: Row, seed: int) -> tuple[object, ...]:
        """Return what a row's cell is kept under."""
        parts: list[object] = [
            row.model_dump(exclude={"table", "label"}),
            row.table == _SILOS,
            seed,
        ]
        if isinstance(row.source, Experts) and row.source.num != self.preset.num_islands:
            parts.append("of a rate of its own")
        if row.table == _WIRE:
            parts.append("bytes")
        if isinstance(row.router, FittedRouter):
            parts.append(self.preset.model_dump(include={"learned_steps", "completed"}))
        return self._key(*parts)

    def found(self, row: Row, seed: int) -> Cell | None:
        """Return a row's figures if they were measured."""
        known = settled(row, self.preset, self.chosen) or settled(
            row, self.preset, self._own_choice
        )
        kept = self._kept_cell(known, seed) if known else None
        return kept or self.published.cell(row.table, row.label, seed, self.judge.about)

    def rate(self, source: Trained) -> RateChoice:
        """Return the learning rate of models like this one that is best on validation images.

        Raises:
            BusyError: another process chooses it.
        """
        source = self._tuned(source)
        return self.chosen(source) or self._own_rate(source)

    def _tuned(self, source: Trained) -> Trained:
        """Return whose rate a model takes: its own, or where averaging is not tuned that of as many experts."""
        if isinstance(source, Federated) and not self.preset.federated_tuned:
            return Experts(num=source.num)
        return source

    def _own_rate(self, source: Trained) -> RateChoice:
        """Return the rate that this run's classifier chooses."""
        kind = kind_of(source, self.preset)
        judge = self.judge.about.digest

        def choose() -> RateChoice:
            choice = best_rate(
                self.preset, judge, partial(self._tried, tuned_as(source, self.preset))
            )
            say(f"rate of {kind} {choice.rate:g}, by FID on validation images: {choice.in_words}")
            return choice

        return self._once(self._key("rate", kind), partial(self._own_choice, source), choose)

    def chosen(self, source: Trained) -> RateChoice | None:
        """Return the rate of models like this one, if it was chosen already or leaves nothing to choose.

        A published one comes first: where this run's classifier chooses as well, to compare, all seeds have one rate.
        """
        source = self._tuned(source)
        published = self.published.rate(kind_of(source, self.preset))
        return only_rate(source, self.preset) or published or self._own_choice(source)

    def _own_choice(self, source: Trained) -> RateChoice | None:
        """Return the rate that this run's classifier chose, or that leaves nothing to choose."""
        kind = kind_of(source, self.preset)
        return only_rate(source, self.preset) or self.kept.read(self._key("rate", kind), RateChoice)

    def _tried(self, source: Trained, rate: float) -> tuple[float, Cost]:
        """Return the FID on validation images of a model that is trained at a rate, and what training it took."""
        made = self._made(source, rate, _TUNING_SEED)
        images = self._drawn(
            made.ensemble, Row(table=0, label="tuning", source=source), _TUNING_SEED
        ).images
        return self.judge.validation_fid(clipped(images)), made.cost

    def made(self, source: Trained, seed: int) -> Made:
        """Return a model at its chosen rate, trained now unless it is there.

        Raises:
            NumericalError: training diverges at all rates that were tried.
        """
        if not (choice := self.rate(source)).trains:
            got = choice.in_words
            raise NumericalError(
                f"rates of {kind_of(source, self.preset)}", expected="one that trains", got=got
            )
        return self._made(source, choice.rate, seed)

    def name(self, source: Trained, rate: float, seed: int) -> str:
        """Name the folder of a model by all that it depends on."""
        key = (
            _VERSION,
            self.world.name,
            len(self.world.train),
            self.preset.sizes(include=_TRAINING),
        )
        return f"{source.kind}-{sha256_hex(repr((*key, source.model_dump(), rate, seed)).encode())[:10]}"

    def _made(self, source: Trained, rate: float, seed: int) -> Made:
        name = self.name(source, rate, seed)
        if name not in self.at_hand:
            self.at_hand.clear()
            with alone(self.workshop.out, name):
                self.at_hand[name] = self._trained(source, rate, seed, name)
        return self.at_hand[name]

    def _trained(self, source: Trained, rate: float, seed: int, name: str) -> Made:
        match source:
            case Monolith():
                start = self._start(source.start, seed)
                return monolith(self.workshop, source, rate, seed, name, start)
            case Experts():
                start = self._start(source.start, seed)
                return experts(self.workshop, source, rate, seed, name, start)
            case Federated() if source.in_process:
                start = self._start(source.start, seed)
                return averaged_in_process(self.workshop, source, rate, seed, name, start)
            case Federated():
                return averaged(self.workshop, source, rate, seed, name)
            case Student():
                teachers = Experts(budget=source.budget, num=source.num)
                made = self._made(teachers, self.rate(teachers).rate, seed)
                return student(self.workshop, source, made, rate, seed, name)

    def _start(self, source: Monolith | FirstRound | None, seed: int) -> Weights | None:
        """Return the weights of the model from which others start, trained now unless it is there."""
        if source is None:
            return None
        if isinstance(source, Monolith):
            return weights_of(self.made(source, seed).ensemble, 0)
        ensemble = self.made(source.experts, seed).ensemble
        images = self.world.public.images[:MAX_COMPARED_IMAGES]
        eps = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        images = images.to(self.workshop.device)
        eps = eps.to(self.workshop.device)
        losses = [
            velocity_loss(ensemble.experts[number], path_named("linear"), images, eps)
            for number in range(len(ensemble.experts))
        ]
        return weights_of(ensemble, losses.index(min(losses)))

    def _measured(self, row: Row, seed: int) -> Cell:
        num = self.preset.num_samples
        of_silos = row.table == _SILOS
        if isinstance(row.source, TrainingImages):
            order = torch.randperm(
                len(self.world.train), generator=torch.Generator().manual_seed(seed)
            )
            figures = self.judge.figures(self.world.train.images[order[:num]], of_silos=of_silos)
            return self._cell(seed, min(num, len(order)), 0.0, figures, None, "")
        made = self.made(row.source, seed)
        ensemble, counted = prepared(made, row, self.world.train)
        if isinstance(row.router, FittedRouter):
            ensemble = with_router(ensemble, self._routers(made, seed).get(row.router))
        classes = classes_of(self.world.train, num, seed) if row.source.conditional else None
        started = time.monotonic()
        samples = self._drawn(ensemble, row, seed, classes)
        seconds = time.monotonic() - started
        images = clipped(samples.images)
        figures = self.judge.figures(images, of_silos=of_silos)
        if classes is not None:
            figures["agreement"] = self.judge.agreement(images, classes)
        evaluations = sum(expert.num for expert in counted) / num
        figures["evaluations"], figures["images_per_s"] = (
            Figure(value=evaluations),
            Figure(value=num / seconds),
        )
        figures["flops"] = Figure(value=made.cost.flops)
        if isinstance(row.router, FittedRouter):
            figures |= self._routers(made, seed).figures(row.router)
            images = self.world.test.images[: self.preset.completed]
            strategy = STRATEGIES[row.strategy]
            steps = self.preset.sampling_steps
            figures["completion_error"] = completion_error(ensemble, images, strategy, steps, seed)
        if isinstance(row.source, Experts) and not row.merged:
            figures |= self._shares(samples, prior_of(made.ensemble, row), seed)
            if row.source.partition == "clusters" and row.prior == "data":
                figures["share_error_images"] = self._shares_of_images(images, row.source, seed)
        if row.table == _WIRE and isinstance(row.source, Experts | Federated):
            figures |= wire(
                self.workshop, row.source, self.name(row.source, self.rate(row.source).rate, seed)
            )
        if row.table == JOINING and not isinstance(row.source, Student):
            figures |= self._joining(row.source, made, images, seed)
        return self._cell(seed, num, seconds, figures, made, router_of(ensemble, row))

    def _joining(
        self, source: Monolith | Experts | Federated, made: Made, images: Tensor, seed: int
    ) -> dict[str, Figure]:
        """Return what travels, what the base cost, and what every silo's expert is worth by itself."""
        num_bytes = 4 * sum(weight.numel() for weight in weights_of(made.ensemble, 0).values())
        figures: dict[str, float] = {}
        if source.start is not None:
            figures["start_flops"] = self._start_cost(source.start, seed)
        if isinstance(source, Federated):
            figures["rounds"] = source.rounds
            figures["bytes"] = 2 * source.rounds * source.num * num_bytes
        if isinstance(source, Experts) and source.partition == "silos":
            figures["rounds"] = 1 if source.start in (None, PUBLIC_BASE) else 2
            figures["bytes"] = num_messages(source) * num_bytes
            if source.whole:
                # Only then has a silo alone as many operations as it would have without the others.
                figures |= self._alone(source, made, images, seed)
        return {name: Figure(value=float(value)) for name, value in figures.items()}

    def _start_cost(self, source: Monolith | FirstRound, seed: int) -> float:
        if isinstance(source, FirstRound):
            return self.made(source.experts, seed).cost.flops
        return self.made(source, seed).cost.flops

    def _own_references(self, source: Experts, seed: int) -> dict[int, Tensor]:
        """Return which test images have a silo's own mix of classes, by silo; without silos of too few for an FID."""
        silo_M = self.world.silos_of_test_images(source.num, seed, source.concentration)
        rows_of_silos = {silo: (silo_M == silo).nonzero().flatten() for silo in range(source.num)}
        least = self.judge.min_reference
        return {silo: rows for silo, rows in rows_of_silos.items() if len(rows) >= least}

    def _alone(
        self, source: Experts, made: Made, joint_images: Tensor, seed: int
    ) -> dict[str, float]:
        """Return the FIDs of the silos' single experts against all test images and against the silo's own.

        `own_fid` is the mean over the silos that have enough test images, `own_silos` their number. There is no
        `smallest_own_fid` where the smallest silo is not among them. `joint_own_fid` and `smallest_joint_own_fid` are
        the same with the samples of the ensemble, `joint_images`.
        """
        references = self._own_references(source, seed)
        against_all = []
        against_own = {}
        joint_against_own = {}
        for silo in range(source.num):
            alone = replace(
                made.ensemble,
                experts=[made.ensemble.experts[silo]],
                expert_ids=(),
                router=None,
                prior=[1.0],
            )
            samples = self._drawn(
                alone, Row(table=JOINING, label=f"silo {silo}", source=source), seed
            )
            images = clipped(samples.images)
            against_all.append(self.judge.fid(images).value)
            if silo in references:
                against_own[silo] = self.judge.fid(images, references[silo]).value
                joint_against_own[silo] = self.judge.fid(joint_images, references[silo]).value
        figures = {
            "alone_fid": sum(against_all) / source.num,
            "own_silos": float(len(against_own)),
        }
        if against_own:
            figures["own_fid"] = sum(against_own.values()) / len(against_own)
            figures["joint_own_fid"] = sum(joint_against_own.values()) / len(against_own)
        sizes = [len(rows) for rows in made.own_K]
        smallest = sizes.index(min(sizes))
        if smallest in against_own:
            figures["smallest_own_fid"] = against_own[smallest]
            figures["smallest_joint_own_fid"] = joint_against_own[smallest]
        return figures

    def _routers(self, made: Made, seed: int) -> Routers:
        """Return the routers for an ensemble, fitted now unless they are at hand."""
        if not self.routers or self.routers[0].made is not made:
            self.routers[:] = [
                Routers.of(self.world, self.preset, made, seed, self.workshop.device)
            ]
        return self.routers[0]

    def _drawn(
        self, ensemble: Ensemble, row: Row, seed: int, classes: Tensor | None = None
    ) -> Samples:
        with self.clock.progress(f"{row.label}: drawing") as step:
            return drawn(ensemble, row, self.preset, seed, classes, step)

    def _shares(self, samples: Samples, prior: Sequence[float], seed: int) -> dict[str, Figure]:
        error = share_error(samples.expert_N, prior, seed=seed)
        last: Tensor = samples.expert_N == samples.num_experts - 1
        return {
            "share_error": Figure.of(error.error),
            "share_by_chance": Figure(value=error.by_chance),
            "share_mean_by_chance": Figure(value=error.mean_by_chance),
            "smallest_followed": Figure(value=float(last.double().mean())),
        }

    def _shares_of_images(self, images: Tensor, source: Experts, seed: int) -> Figure:
        """Return how far the islands in whose clusters the images lie are from the experts' priors."""
        islands = islands_of(self.workshop, self.name(source, self.rate(source).rate, seed))
        prior = list(self.made(source, seed).ensemble.prior)
        return Figure.of(share_error(island_of(islands, images), prior, seed=seed).error)

    def _cell(
        self,
        seed: int,
        num: int,
        seconds: float,
        figures: dict[str, Figure],
        made: Made | None,
        router: str,
    ) -> Cell:
        return Cell(
            seed=seed,
            cost=made.cost if made else None,
            router=router,
            num_samples=num,
            sampling_seconds=seconds,
            figures=figures,
            commit=commit(),
            hardware=hardware(self.workshop.device),
            utc=utc(),
        )


def depends_on(world: World, preset: Preset) -> tuple[int, str, int, dict[str, object]]:
    """Return all that every figure depends on, beside its row, its seed and the classifier."""
    sizes = preset.sizes(include={*_TRAINING, "rates", "tuning", "num_samples", "sampling_steps"})
    return _VERSION, world.name, len(world.train), sizes


def settings_of(world: World, preset: Preset) -> str:
    """Return a digest of the data set and all sizes, by which published tables are known to be of the same kind."""
    return settings_digest(world.name, len(world.train), preset)


def settings_digest(name: str, num_images: int, preset: Preset) -> str:
    """See `settings_of`.

    Args:
        name: of the data set.
        num_images: training images.
        preset: the sizes.
    """
    sizes = preset.sizes(exclude={"seeds", "chunk"})
    return sha256_hex(repr((_VERSION, name, num_images, sizes)).encode())[:16]


def num_messages(source: Experts) -> int:
    """Return how often an expert's weights travel to or from a silo."""
    num_up = source.num
    num_down = 0
    if source.start is not None:
        num_down = source.num
    if isinstance(source.start, FirstRound):
        num_up += source.num
    elif source.start not in (None, PUBLIC_BASE):
        # The expert of one silo, which becomes the base of all.
        num_up += 1
    return num_up + num_down


def router_of(ensemble: Ensemble, row: Row) -> str:
    """Name the router that samples of a row were drawn with."""
    router = ensemble.router
    if len(ensemble.experts) == 1 or router is None:
        return ""
    if not isinstance(router, Calibrated):
        return "exact posterior" if row.router == "exact" else "prior"
    family = type(router.router).__name__.removesuffix("Router").lower()
    return f"{family}, T = {router.temperature:.2f}"
