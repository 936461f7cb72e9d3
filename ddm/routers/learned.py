"""The learned router: refines the counts router with the silos' noised sketches and with public images.

It has two parts. (a) The mixture's shares, refitted by maximum a posteriori under the sketches' known noise with the
counts as evidence: valid for every t, and in all dimensions of the public sketch. (b) A small network on top,
``log p = (a) + g(t) net(s, t)`` with ``g = alpha_t``, trained on public images to correct the groups' Gaussians
(`ddm.routers.residual`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import Path
from ddm.errors import ShapeError, TensorFileError
from ddm.io.tensors import TensorSpec
from ddm.partition.layout import Layout
from ddm.protocol.routers import LearnedSettings
from ddm.routers.base import LossCallback
from ddm.routers.comparison import HeldOut
from ddm.routers.counts import CountsRouter, counts_router_specs
from ddm.routers.family import FittedRouter, RouterFamily, RouterInputs, StoredRouter
from ddm.routers.refit import refit_shares
from ddm.routers.residual import PublicSketches, Residual, fit_residual
from ddm.routers.sketch import Sketch

# Shape legend: E experts, K silos, B batch, N sketches of one silo, R sketch dimensions, r of them
# in the silos' sketches.

HELD_OUT_SHARE = 0.2
# Shares that differ by less are the same but for rounding.
_CHANGED = 1e-6
_PREFIX = "residual."


class LearnedRouter:
    """A refitted mixture plus a residual network.

    Args:
        mixture: a counts router whose shares were refitted on sketches.
        residual: the network; it distinguishes silos, not the experts of one silo.
        silo_E: the number of each expert's silo; one expert a silo when omitted.
    """

    def __init__(
        self,
        mixture: CountsRouter,
        residual: Residual,
        silo_E: Sequence[int] | None = None,
    ) -> None:
        self.num_experts = mixture.num_experts
        self.sketch = mixture.sketch
        self.mixture = mixture
        self.residual = residual.requires_grad_(False)
        if silo_E is None:
            silo_E = range(mixture.num_experts)
        self.silo_E = list(silo_E)

    def head(self, rank: int) -> CountsRouter:
        """Return the router of the sketch's leading `rank` dimensions: the mixture alone, as the network needs all."""
        return self.mixture.head(rank)

    def split(self, layout: Layout) -> "LearnedRouter":
        """Return the router of experts from one of silos: the mixture's rows are split, the network's are shared."""
        mixture = self.mixture.split(layout)
        return LearnedRouter(mixture, self.residual, layout.silo_E)

    def differs(self, counts_router: CountsRouter) -> bool:
        """Whether training changed the shares or the network."""
        mass_KG = self.mixture.log_mass_KG.exp()
        mass_before_KG = counts_router.log_mass_KG.exp()
        largest_change = float((mass_KG - mass_before_KG).abs().max())
        return largest_change > _CHANGED or self.residual.is_nonzero

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | e, t)`` up to a term common to all e, shape (B, E); equal for all e at t = 1.

        Args:
            x_B: noised images, shape (B, ...).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        s_BR = self.sketch.of(x_B, t_B, self.mixture.path)
        return self.sketch_log_likelihood(s_BR, t_B)

    def sketch_log_likelihood(self, s_BR: Tensor, t_B: Tensor) -> Tensor:
        """Return `log_likelihood` of sketches ``s(x_t)``, shape (B, E)."""
        base_BE = self.mixture.sketch_log_likelihood(s_BR, t_B)
        if not torch.compiler.is_compiling():
            # A network that torch traces cannot be moved.
            self.residual.to(s_BR.device)
        correction_BK: Tensor = self.residual(s_BR, t_B)
        # The network distinguishes silos alone, so that all experts of one get the same correction.
        correction_BE = correction_BK[:, self.silo_E]
        return base_BE + correction_BE.to(base_BE)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a release stores; the sketch is the plan's."""
        tensors = self.mixture.tensors()
        for name, tensor in self.residual.state_dict().items():
            tensors[_PREFIX + name] = tensor.detach()
        return tensors

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        sketch: Sketch,
        settings: LearnedSettings,
        path: Path,
        silo_E: Sequence[int],
    ) -> "LearnedRouter":
        """Rebuild the router from tensors loaded against `learned_router_specs`."""
        mixture = CountsRouter.from_tensors(tensors, sketch, path)
        num_silos = max(silo_E) + 1
        residual = Residual(sketch, num_silos, settings.hidden, settings.depth, path)
        weights = {}
        for name, tensor in tensors.items():
            if name.startswith(_PREFIX):
                weights[name.removeprefix(_PREFIX)] = tensor
        residual.load_state_dict(weights)
        return cls(mixture, residual, silo_E)


def learned_router_specs(
    silo_E: Sequence[int],
    sketch: Sketch,
    settings: LearnedSettings,
    path: Path,
) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored learned router."""
    # Only shapes are wanted, and no memory is taken for weights.
    num_silos = max(silo_E) + 1
    with torch.device("meta"):
        residual = Residual(sketch, num_silos, settings.hidden, settings.depth, path)
    specs = counts_router_specs(len(silo_E), sketch.num_groups)
    for name, tensor in residual.state_dict().items():
        specs[_PREFIX + name] = TensorSpec("F32", tuple(tensor.shape))
    return specs


def split_sketches(
    sketches: Mapping[str, Tensor],
    seed: int,
    share: float = HELD_OUT_SHARE,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Hold out `share` of every silo's sketches, at least one, to evaluate a trained router on.

    Returns:
        The sketches to train on and those held out, by silo.

    Raises:
        ShapeError: a silo has fewer than two sketches.
    """
    train: dict[str, Tensor] = {}
    held_out: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for silo, s_NR in sketches.items():
        num = len(s_NR)
        if num < 2:
            subject = f"sketches of {silo}"
            raise ShapeError(subject, expected="at least 2 sketches", got=str(num))
        order_N = torch.randperm(num, generator=generator)
        num_held_out = max(1, round(share * num))
        held_out[silo] = s_NR[order_N[:num_held_out]]
        train[silo] = s_NR[order_N[num_held_out:]]
    return train, held_out


@dataclass(frozen=True)
class SiloSketches:
    """The sketches that silos released, and how much each silo counts.

    Attributes:
        by_silo: noised sketches (N, r) by silo, in the router's order.
        num_units: the public number of units of each silo.
        t_release: noise level of the sketches.
        share_K: each silo's weight in training the network; its share of all units when omitted.
    """

    by_silo: Mapping[str, Tensor]
    num_units: Sequence[int]
    t_release: float
    share_K: Sequence[float] | None = None

    def prior_K(self) -> Tensor:
        """Return each silo's weight in training the network, float64, shape (K,)."""
        share_K = self.share_K
        if share_K is None:
            total = sum(self.num_units)
            share_K = [num / total for num in self.num_units]
        return torch.tensor(share_K, dtype=torch.float64)


def fit_learned(
    counts_router: CountsRouter,
    sketches: SiloSketches,
    public: PublicSketches,
    settings: LearnedSettings,
    seed: int,
    on_progress: LossCallback | None = None,
) -> LearnedRouter:
    """Refit the mixture on the silos' sketches, then train the network on public images.

    Args:
        counts_router: of the same plan; its shares and their errors are the prior of the refit.
        sketches: the silos', in the router's order.
        public: public images that the plan was fitted on.
        settings: the plan's sizes and number of steps.
        seed: the seed of batches, noise and initial weights; the statistics are private already.
        on_progress: called with step, number of steps, and held-out loss.

    Raises:
        ShapeError: the numbers of silos and of the router's experts differ.
        NumericalError: the training diverged.
    """
    num_silos = len(sketches.by_silo)
    num_with_units = len(sketches.num_units)
    if num_silos != counts_router.num_experts or num_with_units != num_silos:
        raise ShapeError(
            "sketches",
            expected=f"{counts_router.num_experts} silos",
            got=f"{num_silos}, and units of {num_with_units}",
        )
    sketches_K = list(sketches.by_silo.values())
    mixture = refit_shares(counts_router, sketches_K, sketches.t_release)
    prior_K = sketches.prior_K()
    residual = fit_residual(mixture, public, prior_K, settings, seed, on_progress)
    return LearnedRouter(mixture, residual)


class LearnedFamily(RouterFamily):
    """Counts, refitted on the silos' sketches and corrected by a network.

    Args:
        settings: the plan's.
    """

    states_t_release = True

    def __init__(self, settings: LearnedSettings) -> None:
        self.settings = settings

    def fit(self, inputs: RouterInputs) -> FittedRouter:
        """See `RouterFamily.fit`; an owner's counts are exact, so that nothing is refitted."""
        if inputs.t_release is None:
            share_K = torch.tensor(inputs.share_K, dtype=torch.float64)
            residual = fit_residual(
                inputs.counts,
                inputs.public_sketches(),
                share_K,
                self.settings,
                inputs.seed,
                inputs.on_progress,
            )
            router = LearnedRouter(inputs.counts, residual)
            return self._fitted(router, inputs, held_out=None)
        train, held_out = split_sketches(inputs.sketches, inputs.seed)
        router = fit_learned(
            inputs.counts,
            SiloSketches(train, inputs.num_units, inputs.t_release, inputs.share_K),
            inputs.public_sketches(),
            self.settings,
            inputs.seed,
            inputs.on_progress,
        )
        held_out_sketches = list(held_out.values())
        released_rank = held_out_sketches[0].shape[1]
        narrow_sketch = inputs.counts.sketch.head(released_rank)
        compared = HeldOut(held_out_sketches, narrow_sketch, inputs.t_release)
        return self._fitted(router, inputs, held_out=compared)

    def _fitted(
        self,
        router: LearnedRouter,
        inputs: RouterInputs,
        held_out: HeldOut | None,
    ) -> FittedRouter:
        # Compared before the split, since the counts router is one of silos as well.
        is_changed = router.differs(inputs.counts)
        if inputs.layout is not None:
            router = router.split(inputs.layout)
        return FittedRouter(router, held_out, is_changed)

    def load(self, stored: StoredRouter) -> LearnedRouter:
        """See `RouterFamily.load`."""
        # An owner's router is made without sketches, so that its manifest has no noise level to state.
        if stored.t_release is None and stored.plan.statistics.private:
            expected = "a router with the t_release of the sketches it was made from"
            raise TensorFileError(stored.file_name, expected=expected, got="no t_release")
        specs = learned_router_specs(stored.silo_E, stored.sketch, self.settings, stored.path)
        return LearnedRouter.from_tensors(
            stored.read_tensors(specs), stored.sketch, self.settings, stored.path, stored.silo_E
        )
