"""How large everything is: a few seconds a model, a few minutes, or a data-centre GPU."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Literal

from ddm.protocol.architecture import RATE_TIMES_WIDTH, Dit
from ddm.protocol.base import Model
from ddm.protocol.routers import SamplesSettings

PresetName = Literal["smoke", "cpu", "gpu"]


class Preset(Model):
    """All that decides on figures, beside data and seeds.

    Attributes:
        name: as on the command line.
        network: of monolith and experts.
        num_steps: training steps of budget 1, of all models.
        batch_size: images in a step of the monolith; an expert of K has this over K.
        rates: learning rates to choose among on validation images, each over the network's width.
        tuning: share of the steps of budget 1 that a choice of the rate takes; while the best is the lowest or the
            highest that was tried, one beyond it is tried as well.
        router: of ensembles without classes: counts of public groups, which takes no training, or the
            transformer, where training it is worth its operations.
        transformer: the router of ensembles with classes as conditions, and of table 6; its steps at budget 1.
        fit_images: most training images that encoder, clusters and router are fitted and judged on.
        classifier_steps: of the network whose features FID is taken in.
        num_islands: K of the ensembles whose strategies are compared.
        other_islands: further K.
        updates: how many times as many steps, each of as many times fewer images, a monolith is tried with as well.
        expert_updates: the same of experts.
        budgets: shares of budget 1 of which FID is shown.
        num_samples: of every figure.
        sampling_steps: of the midpoint rule, two evaluations each.
        solver_evaluations: evaluations a sample at which solvers are compared.
        pca_dim: dimensions of the second feature space, and of the plans' encoders.
        own_samples: of the ensemble, on which a student is trained.
        epsilons: of the routers' statistics.
        learned_steps: of the router learned.
        completed: test images whose halves are completed, to compare routers.
        num_silos: of federated averaging, and of the ensemble beside it.
        rounds: of federated averaging.
        fewer_rounds: of its cheaper row.
        mus: weights of FedProx's proximal term that are tried.
        federated_tuned: whether averaging has a learning rate of its own, or that of as many experts.
        guidance: scales of the guidance towards classes, beside 0.
        chunk: samples that are evaluated together.
        seeds: how many by default.
    """

    name: PresetName
    network: Dit
    num_steps: int
    batch_size: int
    rates: tuple[float, ...] = (RATE_TIMES_WIDTH, 2 * RATE_TIMES_WIDTH, 4 * RATE_TIMES_WIDTH)
    tuning: float = 0.25
    router: Literal["counts", "samples"] = "samples"
    transformer: SamplesSettings
    fit_images: int = 24_000
    classifier_steps: int
    num_islands: int = 8
    other_islands: tuple[int, ...] = (2, 4, 16)
    updates: tuple[int, ...] = (2, 4, 8)
    expert_updates: tuple[int, ...] = (2, 4)
    budgets: tuple[float, ...] = (0.125, 0.25, 0.5)
    num_samples: int
    sampling_steps: int
    solver_evaluations: tuple[int, ...] = (8, 16, 32)
    pca_dim: int = 32
    own_samples: int
    epsilons: tuple[float, ...] = (0.1, 0.3, 1.0, 4.0)
    learned_steps: int = 600
    completed: int = 500
    num_silos: int = 4
    rounds: int
    fewer_rounds: int = 10
    mus: tuple[float, ...] = (0.0001, 0.001, 0.01)
    federated_tuned: bool = True
    guidance: tuple[float, ...] = (1.0, 3.0)
    chunk: int = 128
    seeds: int = 3

    def sizes(
        self, *, include: Set[str] | None = None, exclude: Set[str] | None = None
    ) -> dict[str, object]:
        """Return fields by name, of network and router those alone that are not the default.

        A field that these documents gain later, with a default that changes nothing, leaves the sizes as they were, so
        that what was measured before can be continued.

        Args:
            include: names of fields; all where None.
            exclude: names of fields to leave out.
        """
        sizes = self.model_dump(
            include=set(include) if include else None, exclude=set(exclude) if exclude else None
        )
        for name in ("network", "transformer"):
            if name in sizes:
                sizes[name] = getattr(self, name).model_dump(exclude_defaults=True)
        return sizes

    def scaled(self, share: float) -> "Preset":
        """Return it with this share of all training steps and samples."""
        steps = max(1, round(share * self.transformer.num_steps))
        transformer = self.transformer.model_copy(update={"num_steps": steps})
        num = {
            name: max(1, round(share * getattr(self, name)))
            for name in ("num_steps", "num_samples")
        }
        return self.model_copy(update=num | {"transformer": transformer})


def preset_for(name: PresetName, shape: Sequence[int]) -> Preset:
    """Return a preset for images of this shape."""
    return _PRESETS[name](2 if shape[-1] <= 16 else 4)


def _smoke(patch: int) -> Preset:
    return Preset(
        name="smoke",
        network=Dit(patch=patch, hidden=32, depth=2, heads=2),
        num_steps=60,
        batch_size=32,
        rates=(RATE_TIMES_WIDTH, 2 * RATE_TIMES_WIDTH),
        tuning=0.5,
        router="counts",
        transformer=SamplesSettings(
            patch=patch,
            hidden=16,
            depth=1,
            heads=2,
            num_steps=30,
            batch_size=32,
            images_per_expert=64,
        ),
        classifier_steps=150,
        num_islands=4,
        other_islands=(2,),
        updates=(2,),
        expert_updates=(2,),
        budgets=(0.25, 0.5),
        num_samples=96,
        sampling_steps=4,
        solver_evaluations=(4, 8),
        pca_dim=12,
        own_samples=256,
        epsilons=(1.0,),
        learned_steps=20,
        completed=24,
        num_silos=2,
        rounds=2,
        fewer_rounds=1,
        mus=(0.01,),
        federated_tuned=False,
        guidance=(1.0,),
        seeds=1,
    )


def _cpu(patch: int) -> Preset:
    return Preset(
        name="cpu",
        network=Dit(patch=patch, hidden=96, depth=3, heads=4),
        num_steps=1500,
        batch_size=64,
        router="counts",
        transformer=SamplesSettings(
            patch=patch, hidden=48, depth=2, heads=4, num_steps=800, batch_size=64, precision="auto"
        ),
        classifier_steps=1500,
        num_samples=2000,
        own_samples=8000,
        rounds=100,
        sampling_steps=10,
    )


def _gpu(patch: int) -> Preset:
    return Preset(
        name="gpu",
        network=Dit(patch=patch // 2, hidden=256, depth=8, heads=8),
        num_steps=20_000,
        batch_size=256,
        transformer=SamplesSettings(
            patch=patch,
            hidden=128,
            depth=4,
            heads=4,
            num_steps=8000,
            batch_size=256,
            images_per_expert=5000,
            precision="auto",
        ),
        fit_images=40_000,
        classifier_steps=3000,
        budgets=(0.0625, 0.125, 0.25, 0.5),
        num_samples=10_000,
        own_samples=40_000,
        rounds=100,
        sampling_steps=25,
        solver_evaluations=(8, 16, 32, 64),
        pca_dim=64,
        chunk=2048,
    )


_PRESETS: Mapping[PresetName, Callable[[int], Preset]] = {"smoke": _smoke, "cpu": _cpu, "gpu": _gpu}
