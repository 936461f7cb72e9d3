"""Measures rows: chooses rates, finds or trains the models, draws samples and judges them; keeps every cell."""

import time
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddm.ensemble import Ensemble
from ddm.errors import NumericalError
from ddm.evaluation.shares import share_error
from ddm.protocol.base import sha256_hex
from ddm.sampling.samples import Samples
from ddm.system.console import progress, say
from examples.paper.tables.clock import Clock
from examples.paper.tables.contents import STRATEGIES, Experts, Monolith, Row, TrainingImages
from examples.paper.tables.data import World
from examples.paper.tables.judging import Judge, clipped
from examples.paper.tables.models import Counted, ExactRouter, Made, Workshop
from examples.paper.tables.presets import Preset
from examples.paper.tables.results import Cell, Choice, Figure, Kept, commit, hardware, utc

_TUNING_SEED = 1000  # none of the seeds that are reported
_SILOS = 7  # the table whose rows say what becomes of the smallest silo
_TRAINING = {
    "network",
    "num_steps",
    "batch_size",
    "router",
    "fit_images",
    "pca_dim",
    "num_islands",
}  # what models depend on


@dataclass(frozen=True)
class Lab:
    """Everything at hand.

    Attributes:
        world: the data set.
        preset: the sizes.
        out: the folder of everything.
        judge: judges samples.
        clock: says when to stop.
        at_hand: the model that was used last, by its name.
    """

    world: World
    preset: Preset
    out: Path
    judge: Judge
    clock: Clock
    at_hand: dict[str, Made] = field(default_factory=dict)

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
        preset = self.preset.model_dump(include={*_TRAINING, "rates", "tuning", "num_samples", "sampling_steps"})
        return (self.world.name, len(self.world.train), self.judge.about.digest, preset, *parts)

    def cell(self, row: Row, seed: int) -> Cell:
        """Return a row's figures for a seed, measured now unless they are there."""
        key = self.key(row, seed)
        found = self.kept.read(key, Cell)
        if found is None:
            self.clock.check()
            found = self._measured(row, seed)
            self.kept.write(key, found)
            say(f"table {row.table}, seed {seed}, {row.label}: FID {found.figures['fid'].value:.1f}")
        return found

    def key(self, row: Row, seed: int) -> tuple[object, ...]:
        """Return what a row's cell is kept under."""
        return self._key(row.model_dump(exclude={"table", "label"}), row.table == _SILOS, seed)

    def rate(self, kind: str) -> Choice:
        """Return the learning rate of monoliths, or of experts, that is best on validation images.

        A preset with one rate leaves nothing to choose.
        """
        if len(self.preset.rates) == 1:
            return Choice(rate=self.preset.rates[0] / self.preset.network.hidden, tried={}, steps=0, flops=0.0)
        key = self._key("rate", kind)
        found = self.kept.read(key, Choice)
        if found is None:
            found = self._chosen(kind)
            self.kept.write(key, found)
            tried = ", ".join(
                f"{rate}: {'diverged' if fid is None else f'{fid:.1f}'}" for rate, fid in found.tried.items()
            )
            say(f"rate of {kind} {found.rate:g}, by FID on validation images: {tried}")
        return found

    def _chosen(self, kind: str) -> Choice:
        tried: dict[str, float | None] = {}
        best, best_fid, cost = 0.0, inf, None
        source: Monolith | Experts = (
            Monolith(budget=self.preset.tuning)
            if kind == "monolith"
            else Experts(budget=self.preset.tuning, num=self.preset.num_islands)
        )
        for times_width in self.preset.rates:
            rate = times_width / self.preset.network.hidden
            try:
                made = self._made(source, rate, _TUNING_SEED)
                images = self._drawn(made.ensemble, Row(table=0, label="tuning", source=source), _TUNING_SEED).images
                fid: float | None = self.judge.validation_fid(clipped(images))
                cost = made.cost
            except NumericalError:
                fid = None
            tried[f"{rate:.3g}"] = fid
            if fid is not None and fid < best_fid:
                best, best_fid = rate, fid
        if cost is None:
            raise NumericalError(f"rates of {kind}", expected="one that trains", got="none of them")
        return Choice(rate=best, tried=tried, steps=cost.steps, flops=cost.flops)

    def made(self, source: Monolith | Experts, seed: int) -> Made:
        """Return a model at its chosen rate, trained now unless it is there."""
        return self._made(source, self.rate(source.kind).rate, seed)

    def _made(self, source: Monolith | Experts, rate: float, seed: int) -> Made:
        key = (self.world.name, len(self.world.train), self.preset.model_dump(include=_TRAINING))
        name = f"{source.kind}-{sha256_hex(repr((*key, source.model_dump(), rate, seed)).encode())[:10]}"
        if name not in self.at_hand:
            self.at_hand.clear()
            if isinstance(source, Monolith):
                self.at_hand[name] = self.workshop.monolith(source, rate, seed, name)
            else:
                self.at_hand[name] = self.workshop.experts(source, rate, seed, name)
        return self.at_hand[name]

    def _measured(self, row: Row, seed: int) -> Cell:
        num, of_silos = self.preset.num_samples, row.table == _SILOS
        if isinstance(row.source, TrainingImages):
            order = torch.randperm(len(self.world.train), generator=torch.Generator().manual_seed(seed))
            figures = self.judge.figures(self.world.train.images[order[:num]], of_silos=of_silos)
            return self._cell(seed, min(num, len(order)), 0.0, figures, None)
        made = self.made(row.source, seed)
        ensemble, counted = self._counted(made, row)
        started = time.monotonic()
        samples = self._drawn(ensemble, row, seed)
        seconds = time.monotonic() - started
        figures = self.judge.figures(clipped(samples.images), of_silos=of_silos)
        evaluations = sum(expert.num for expert in counted) / num
        figures["evaluations"], figures["images_per_s"] = Figure(value=evaluations), Figure(value=num / seconds)
        figures["flops"] = Figure(value=made.cost.flops)
        if isinstance(row.source, Experts):
            figures |= self._shares(samples, made.ensemble.prior if row.prior == "data" else None, seed)
        return self._cell(seed, num, seconds, figures, made)

    def _counted(self, made: Made, row: Row) -> tuple[Ensemble, list[Counted]]:
        experts = [made.ensemble.experts[k] for k in range(len(made.ensemble.experts))]
        counted = [Counted(expert) for expert in experts if isinstance(expert, nn.Module)]
        ensemble = replace(made.ensemble, experts=counted)
        if row.router == "exact":
            images = self.world.train.images
            ensemble = replace(ensemble, router=ExactRouter([images[own] for own in made.own_K]))
        return ensemble, counted

    def _drawn(self, ensemble: Ensemble, row: Row, seed: int) -> Samples:
        how: dict[str, Any] = {"prior": [1.0] * len(ensemble.experts)} if row.prior == "equal" else {}
        strategy = STRATEGIES["lock(1)" if isinstance(row.source, Monolith) else row.strategy]
        with progress(f"{row.label}: drawing") as tell:

            def step(done: int, total: int) -> None:
                self.clock.check()
                tell(done, total)

            return ensemble.sample(
                self.preset.num_samples,
                strategy=strategy,
                steps=row.steps or self.preset.sampling_steps,
                solver=row.solver,
                seed=seed,
                on_progress=step,
                **how,
            )

    def _shares(self, samples: Samples, prior: Any, seed: int) -> dict[str, Figure]:
        due = list(prior) if prior is not None else [1.0] * samples.num_experts
        found = share_error(samples.expert_N, due, seed=seed)
        last: Tensor = samples.expert_N == samples.num_experts - 1
        return {
            "share_error": Figure.of(found.error),
            "share_by_chance": Figure(value=found.by_chance),
            "smallest_followed": Figure(value=float(last.double().mean())),
        }

    def _cell(self, seed: int, num: int, seconds: float, figures: dict[str, Figure], made: Made | None) -> Cell:
        return Cell(
            seed=seed,
            cost=made.cost if made else None,
            num_samples=num,
            sampling_seconds=seconds,
            figures=figures,
            commit=commit(),
            hardware=hardware(self.workshop.device),
            utc=utc(),
        )
