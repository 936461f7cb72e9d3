"""The samples router, the paper's: a transformer on x_t itself, which may read the experts' condition.

Trained on labelled public images, see `ddm.routers.labelled`, it costs no privacy beyond that of the counts that weigh
them. Trained on images that the submitted experts generate, it has the privacy of the experts' weights: none, where
they were trained without DP-SGD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from ddm.diffusion.path import Expert, Experts, Path, expand_time, x_t
from ddm.diffusion.rng import stream
from ddm.diffusion.solver import integrate, uniform_times
from ddm.errors import NumericalError
from ddm.io.tensors import TensorSpec
from ddm.models.token_router import TokenRouter
from ddm.protocol.architecture import Condition, Dit, NoCondition
from ddm.protocol.plan import Plan
from ddm.protocol.routers import SamplesSettings
from ddm.routers.base import LossCallback
from ddm.routers.family import FittedRouter, RouterFamily, RouterInputs, StoredRouter
from ddm.routers.labelled import Labelled
from ddm.routers.training_state import RouterTrainingState
from ddm.system.cores import computing_in
from ddm.system.devices import Precision, computes_in_bf16
from ddm.training.checkpoints import Checkpoints
from ddm.training.config import CHECKPOINT_S
from ddm.training.saving import CheckpointSchedule
from ddm.training.schedule import learning_rate

# Shape legend: E experts, N images, B batch, ... all data dimensions.

_SOLVER_STEPS = 16
_DRAWN_TOGETHER = 256
_CHECKED_TOGETHER = 1024
_PREFIX = "net."
_CHECKS = 10
_CHECK_DRAWS = 4
_MAX_CHECKED = 2048  # images; each is noised to several times


class SamplesRouter:
    """``log p(x_t | e, c, t) = alpha_t net_e(x_t, t, c)``: exactly equal for all experts at t = 1.

    Args:
        net: trained as if all experts had equally many images, so that its logits are log-likelihoods.
        path: the probability path.
        knows_shares: whether it was trained on images that show how data of a condition are divided among experts;
            those that experts were told to draw do not.
    """

    def __init__(
        self,
        net: TokenRouter,
        path: Path,
        *,
        knows_shares: bool = False,
    ) -> None:
        self.num_experts = net.num_experts
        self.net = net.eval().requires_grad_(False)
        self.path = path
        self.knows_shares = knows_shares and net.shares is not None

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """Return ``log p(x_t | e, t)`` up to a term common to all e, shape (B, E); equal for all e at t = 1.

        Args:
            x_B: noised images, shape (B, C, H, W).
            t_B: shape (B,), 0 is data, 1 is noise.
        """
        device = x_B.device
        if not torch.compiler.is_compiling():
            # A network that torch traces cannot be moved.
            self.net.to(device)
        t_B = t_B.to(device, torch.float32)
        return _gated(self.net, x_B.float(), t_B, None, self.path)

    def given(self, condition_B: Tensor) -> "SamplesRouter | _ConditionedRouter":
        """Return ``log p(x_t | e, c, t)`` of samples with these conditions; itself where it reads none."""
        if self.net.shares is None:
            return self
        return _ConditionedRouter(self, condition_B)

    def log_shares(self, condition_B: Tensor) -> Tensor:
        """Return ``log p(c | e)`` up to a term common to all e, shape (B, E); 0 for the null condition."""
        self.net.to(condition_B.device)
        return self.net.log_shares(condition_B, len(condition_B))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a release stores."""
        weights = self.net.state_dict()
        return {_PREFIX + name: tensor.detach() for name, tensor in weights.items()}

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        num_experts: int,
        shape: Sequence[int],
        settings: SamplesSettings,
        path: Path,
        condition: Condition = NoCondition(),
        *,
        knows_shares: bool = False,
    ) -> "SamplesRouter":
        """Rebuild the router from tensors loaded against `samples_router_specs`."""
        net = _build(num_experts, shape, settings, condition)
        weights = {}
        for name, tensor in tensors.items():
            if name.startswith(_PREFIX):
                weights[name.removeprefix(_PREFIX)] = tensor
        net.load_state_dict(weights)
        return cls(net, path, knows_shares=knows_shares)


@dataclass(frozen=True)
class _ConditionedRouter:
    """The router under the conditions of B samples."""

    router: SamplesRouter
    condition_B: Tensor

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        net = self.router.net.to(x_B.device)
        condition_B = self.condition_B.to(x_B.device)
        is_text = condition_B.dim() > 1
        if is_text:
            condition_B = condition_B.float()
        t_B = t_B.to(x_B.device, torch.float32)
        return _gated(net, x_B.float(), t_B, condition_B, self.router.path)


def samples_router_specs(
    num_experts: int,
    shape: Sequence[int],
    settings: SamplesSettings,
    condition: Condition = NoCondition(),
) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored samples router; `condition` is that of the experts."""
    with torch.device("meta"):
        net = _build(num_experts, shape, settings, condition)
    specs = {}
    for name, tensor in net.state_dict().items():
        specs[_PREFIX + name] = TensorSpec("F32", tuple(tensor.shape))
    return specs


def training_flops(
    num_experts: int,
    shape: Sequence[int],
    settings: SamplesSettings,
    condition: Condition = NoCondition(),
) -> int:
    """Return the operations of all matrix products of a router's training steps, forward and backward.

    Args:
        num_experts: E.
        shape: one image, (C, H, W).
        settings: the plan's recipe.
        condition: the condition of the experts; what reading it takes is left out, being a few products a sample.
    """
    with torch.device("meta"):
        net = _build(num_experts, shape, settings, condition)
        image = torch.empty(1, *shape)
        time = torch.empty(1)
        with FlopCounterMode(display=False) as counter:
            logits = net(image, time, None)
            torch.autograd.backward(logits.sum())
    flops_per_image = int(counter.get_total_flops())
    return flops_per_image * settings.num_steps * settings.batch_size


@dataclass(frozen=True)
class _ConditionedExpert:
    """An expert under the conditions of B samples."""

    expert: Expert
    condition_B: Tensor

    def __call__(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return self.expert(x_B, t_B, self.condition_B)


@torch.no_grad()
def draw_from_experts(
    experts: Experts,
    shape: Sequence[int],
    num: int,
    seed: int,
    path: Path,
    on_progress: LossCallback | None,
    *,
    device: torch.device | str = "cpu",
    condition_EN: Tensor | None = None,
) -> Tensor:
    """Generate images with every expert separately, one expert after the other.

    Args:
        experts: velocities on `path`.
        shape: one image.
        num: images of each expert.
        seed: the seed of the initial noise.
        path: the probability path.
        on_progress: called with experts done, experts in all, and nan in place of a loss.
        device: where the experts compute.
        condition_EN: the condition of each image, (E, N) or (E, N, L, D); None for none.

    Returns:
        Shape (E, N, ...), float32, on the CPU.

    Raises:
        NumericalError: an expert generates images that are not finite.
    """
    drawn = []
    times = uniform_times(_SOLVER_STEPS)
    for e in range(len(experts)):
        generator = stream("router samples", seed, e)
        normal = generator.standard_normal((num, *shape), dtype="float32")
        noise = torch.from_numpy(normal)
        # On the schedules of diffusion models sigma is not quite 1 at t = 1.
        x_1 = noise * path.sigma(torch.ones(()))
        # Looked up once for each expert, of which only some are in memory.
        expert = experts[e]
        chunks = []
        for rows in torch.split(torch.arange(num), _DRAWN_TOGETHER):
            velocity = expert
            if condition_EN is not None:
                condition_B = condition_EN[e, rows].to(device)
                velocity = _ConditionedExpert(expert, condition_B)
            x_0 = integrate(velocity, x_1[rows].to(device), times)
            chunks.append(x_0.cpu())
        images = torch.cat(chunks)
        drawn.append(images)
        is_finite_N = images.flatten(1).isfinite().all(1)
        num_broken = num - int(is_finite_N.sum())
        if num_broken:
            got = f"NaN or infinity in {num_broken} of {num}"
            raise NumericalError(
                f"expert {e}",
                expected="finite images",
                got=got,
                remedy=(
                    "Take more steps; if that does not help, this expert cannot be published: `aggregator "
                    "withdraw FED SILO --reason TEXT`."
                ),
            )
        if on_progress:
            on_progress(e + 1, len(experts), float("nan"))
    return torch.stack(drawn)


def fit_samples(
    images: Labelled,
    settings: SamplesSettings,
    path: Path,
    seed: int,
    on_progress: LossCallback | None = None,
    *,
    condition: Condition = NoCondition(),
    knows_shares: bool = False,
    device: torch.device | str = "cpu",
    checkpoints: Checkpoints | None = None,
) -> SamplesRouter:
    """Train the router by cross-entropy on noised images, those of every expert equally often, t uniform.

    The weights with the lowest loss on held-out images of these are kept, the initial ones included. A router that
    reads a condition predicts the expert from image and condition together, ``log p(c | e) + alpha_t net(x_t, t, c)``;
    in a share of the images the condition is hidden.

    Args:
        images: labelled images, with conditions if the router reads them.
        settings: the plan's recipe.
        path: the probability path.
        seed: the seed of initial weights, batches and noise.
        on_progress: called with step, number of steps, and held-out loss.
        condition: the kind of condition of the experts.
        knows_shares: see `SamplesRouter`.
        device: where to train; the router is on the CPU afterwards.
        checkpoints: of this training, from which it goes on; None for none.

    Raises:
        ShapeError: too few images; see `Labelled.divided`.
        NumericalError: the training diverged.
    """
    # Layers draw their weights from torch's global generator, which continues for the caller as if nothing had
    # happened.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = images.images.shape[1:]
        net = _build(images.num_experts, shape, settings, condition)
    generator = torch.Generator().manual_seed(seed)
    train, check = images.divided(generator)
    state = RouterTrainingState(net.to(device), settings, generator)
    _train(state, train, check, settings, path, on_progress, checkpoints)
    return SamplesRouter(net.cpu(), path, knows_shares=knows_shares)


@dataclass(frozen=True)
class _Noised:
    """A batch at its times.

    Attributes:
        x_B: noised images.
        t_B: their times.
        target_BE: p(e | image).
        condition_B: the condition that the router reads, None for none.
    """

    x_B: Tensor
    t_B: Tensor
    target_BE: Tensor
    condition_B: Tensor | None

    @classmethod
    def of(
        cls,
        images: Labelled,
        rows: Tensor,
        path: Path,
        drop: float,
        generator: torch.Generator,
    ) -> "_Noised":
        x_0 = images.images[rows]
        t_B = torch.rand(len(rows), generator=generator)
        noise = torch.randn(x_0.shape, generator=generator)
        x_B = x_t(path, x_0, noise, t_B)
        condition = None
        if images.condition_N is not None:
            condition = images.condition_N[rows]
            uniform_B = torch.rand(len(rows), generator=generator)
            # The null condition, as experts receive it: the class -1, or a text of zeros. A router that also learns
            # without conditions serves the unconditional branch of guidance.
            null = 0
            if condition.dim() == 1:
                null = -1
            condition[uniform_B < drop] = null
        target_BE = images.target_JE[images.cell_N[rows]]
        return cls(x_B, t_B, target_BE, condition)

    def losses(
        self,
        net: TokenRouter,
        path: Path,
        precision: Precision = "fp32",
    ) -> Tensor:
        """Return the cross-entropy of each image, shape (B,), float32, on the net's device."""
        device = net.class_token.device
        x_B = self.x_B.to(device)
        t_B = self.t_B.to(device)
        condition_B: Tensor | None = None
        if self.condition_B is not None:
            condition_B = self.condition_B.to(device)
        in_bf16 = computes_in_bf16(precision, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16):
            logits_BE = _gated(net, x_B, t_B, condition_B, path)
            shares_BE = net.log_shares(condition_B, len(x_B))
        # The loss is summed in float32 whatever the arithmetic of the network.
        joint_BE = logits_BE.float() + shares_BE.float()
        target_BE = self.target_BE.to(device)
        return cross_entropy(joint_BE, target_BE, reduction="none")


def _train(
    state: RouterTrainingState,
    train: Labelled,
    check: Labelled,
    settings: SamplesSettings,
    path: Path,
    on_progress: LossCallback | None,
    checkpoints: Checkpoints | None,
) -> None:
    net = state.net
    generator = state.generator
    order = torch.randperm(len(check), generator=generator)
    checked_rows = order[:_MAX_CHECKED]
    rows = checked_rows.repeat(_CHECK_DRAWS)
    # The same times and noise at every check, so that the losses differ by the weights alone.
    fixed = [
        _Noised.of(check, part, path, settings.drop, generator)
        for part in torch.split(rows, _CHECKED_TOGETHER)
    ]
    weight_N = check.weight_N[rows]
    # After the draws above, which are made anew: the checkpoint has the generator as it was between two steps.
    if checkpoints is not None:
        state.restore(checkpoints)
    schedule = CheckpointSchedule(CHECKPOINT_S)
    num_steps = settings.num_steps
    every = max(1, num_steps // _CHECKS)
    with computing_in(state.threads):
        if state.step == 0:
            state.keep_if_best(_check_loss(net, fixed, weight_N, path))
        while state.step < num_steps:
            batch_rows = train.draw(settings.batch_size, generator)
            batch = _Noised.of(train, batch_rows, path, settings.drop, generator)
            loss_B = batch.losses(net, path, settings.precision)
            mean = loss_B.mean()
            if not bool(torch.isfinite(mean)):
                raise NumericalError(
                    "router training",
                    expected="a finite loss",
                    got=f"{float(mean)} at step {state.step + 1}",
                    remedy="Use a smaller router.learning_rate.",
                )
            state.optimizer.param_groups[0]["lr"] = learning_rate(settings, state.step)
            state.optimizer.zero_grad()
            torch.autograd.backward(mean)
            state.optimizer.step()
            state.step += 1
            if state.step % every == 0 or state.step == num_steps:
                loss = _check_loss(net, fixed, weight_N, path)
                state.keep_if_best(loss)
                if on_progress:
                    on_progress(state.step, num_steps, loss)
            if checkpoints is not None and schedule.is_due():
                with schedule.saving():
                    state.save(checkpoints)
    net.load_state_dict(state.best_weights)


@torch.no_grad()
def _check_loss(
    net: TokenRouter,
    fixed: Sequence[_Noised],
    weight_N: Tensor,
    path: Path,
) -> float:
    """Return the weighted mean loss of images at times that do not change."""
    parts = [part.losses(net, path).double().cpu() for part in fixed]
    loss_N = torch.cat(parts)
    weighted_sum = (loss_N * weight_N).sum()
    return float(weighted_sum / weight_N.sum())


def _gated(
    net: TokenRouter,
    x_B: Tensor,
    t_B: Tensor,
    condition_B: Tensor | None,
    path: Path,
) -> Tensor:
    logits_BE: Tensor = net(x_B, t_B, condition_B)
    # alpha is 0 at t = 1, so that the posterior of pure noise is exactly the prior, whatever the network has learned.
    alpha_B1 = expand_time(path.alpha(t_B), logits_BE)
    return alpha_B1 * logits_BE


def _build(
    num_experts: int,
    shape: Sequence[int],
    settings: SamplesSettings,
    condition: Condition,
) -> TokenRouter:
    sizes = Dit(
        patch=settings.patch,
        hidden=settings.hidden,
        depth=settings.depth,
        heads=settings.heads,
    )
    router_condition = settings.router_condition(condition)
    return TokenRouter(sizes, tuple(shape), num_experts, router_condition)


class SamplesFamily(RouterFamily):
    """A transformer on x_t.

    Args:
        settings: the plan's.
    """

    def __init__(self, settings: SamplesSettings) -> None:
        self.settings = settings

    def fit(self, inputs: RouterInputs) -> FittedRouter:
        """See `RouterFamily.fit`; it reads whole images, so that sketches cannot judge it."""
        router = fit_samples(
            inputs.labelled_images(self.settings),
            self.settings,
            inputs.path,
            inputs.seed,
            inputs.on_progress,
            condition=inputs.plan.condition,
            knows_shares=self._knows_shares(inputs.plan),
            device=inputs.device,
            checkpoints=inputs.checkpoints,
        )
        return FittedRouter(router)

    def load(self, stored: StoredRouter) -> SamplesRouter:
        """See `RouterFamily.load`."""
        plan = stored.plan
        num_experts = len(stored.experts)
        specs = samples_router_specs(num_experts, plan.expert_shape, self.settings, plan.condition)
        return SamplesRouter.from_tensors(
            stored.read_tensors(specs),
            num_experts,
            plan.expert_shape,
            self.settings,
            stored.path,
            plan.condition,
            knows_shares=self._knows_shares(plan),
        )

    def _knows_shares(self, plan: Plan) -> bool:
        """Whether it learns from labels who holds a condition; experts draw what they are told, which says nothing."""
        return self.settings.labels != "experts" or not plan.statistics.private
