"""Distils an ensemble into one dense student: the cost of a single expert, the distribution of the ensemble.

The student is trained like an expert, but its target at x_t is a teacher's velocity there:

    L = E |v(x_t, t) - u_teacher(x_t, t)|^2

The minimiser v is the mean of the teacher's velocities at x_t. Where the teacher is the expert k that x_0 belongs to,
k given x_t has the router's posterior, so this mean is ``sum_k p(k | x_t) u_k(x_t, t)``, the mixture itself, at one
evaluation a step and without a router. McAllister et al. 2025, section 3.6, do this with each training image's cluster
label. Without data, x_0 and its k are the ensemble's own samples. Images that are not distributed like the ensemble's
have no such label: there k is drawn from the router's posterior at x_t, or the teacher is the whole mixture.

Where experts are conditional, student and teacher receive the same condition, the null condition where a step drops it,
and every quantity above is conditioned on it: the label of an image of a class has the posterior given x_t and class.

A teacher's velocity is passed on as the x_0 and eps that it implies at this x_t (`ddm.diffusion.path.x_0_and_eps`), so
that a distillation step is an ordinary step of `ddm.training.loop.train`, with its checkpoints and processes.
"""

# Shape legend: B batch, K experts, ... all data dimensions.
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ddm.diffusion.path import Expert, x_0_and_eps, x_t
from ddm.distillation.dataset import DistillationData, check_labels
from ddm.distillation.posterior import Posterior
from ddm.ensemble import Ensemble, mix_velocity
from ddm.errors import MathError, ShapeError
from ddm.protocol.learning import TDistribution, Training, UniformT
from ddm.sampling.strategies import draw_expert
from ddm.system.devices import Precision, computes_in_bf16
from ddm.training.batches import Batch, Examples
from ddm.training.loop import FinishedTraining, TrainingRun, train
from ddm.training.objective import TrainingObjective

Teacher = Literal["label", "drawn", "mixture"]
"""The teacher at x_t: the expert that x_0 belongs to; one drawn from the posterior at x_t; the whole mixture."""

ExpertWeights = Callable[[Tensor, Batch], Tensor]
"""Called with x_t, on the CPU, and the batch; returns the weights (B, K) of the experts in the teacher's velocity."""


def distill(
    ensemble: Ensemble,
    student: nn.Module,
    data: DistillationData,
    settings: Training,
    run: TrainingRun,
    *,
    teacher: Teacher,
    source: str,
    t_distribution: TDistribution = UniformT(),
) -> FinishedTraining:
    """Train a student on an ensemble's velocities, from the last checkpoint where there is one.

    Args:
        ensemble: the teacher; it computes on its experts' device, which is best the engine's.
        student: the student with the weights to start from; called as ``student(x_B, t_B)``, or as ``student(x_B, t_B,
            c)`` where `data` has labels.
        data: images, their conditions, and for the teacher `label` the expert that each belongs to.
        settings: the recipe, as for an expert.
        run: where it is trained.
        teacher: which experts' velocity is the target at x_t.
        source: names the ensemble; a run does not continue with another one.
        t_distribution: the distribution of the training times.

    Raises:
        KeyboardInterrupt: `should_stop` returned True; a checkpoint was written first.
        MathError: the teacher needs labels, a router or shares of classes that are missing.
        NumericalError: loss or gradient is no longer finite.
        SetupError: the checkpoints belong to another run.
        ShapeError: images of another shape, labels of other experts, or conditions that the experts do not take.
    """
    return train(
        student,
        Examples(data.images, data.labels, data.drop),
        settings,
        TrainingObjective(ensemble.path, t_distribution),
        run,
        teach=teaching(ensemble, data, teacher, source=source, precision=settings.precision),
    )


@dataclass(frozen=True)
class Teaching:
    """A teacher in the form that the training loop calls; see `ddm.training.batches.Teach`.

    Args:
        ensemble: the experts.
        weights: the experts' weights in the target.
        digest: identifies the ensemble, the teacher and the experts that images belong to.
        precision: with bf16 the experts compute in bfloat16, as the student does; they take most of a step's time.
    """

    ensemble: Ensemble
    weights: ExpertWeights
    digest: str
    precision: Precision = "fp32"

    def __call__(self, part: Batch) -> Batch:
        """Return the part with the x_0 and eps whose velocity at the same x_t is the teacher's."""
        ensemble = self.ensemble
        device = ensemble.device
        condition_B = None
        if part.condition is not None:
            condition_B = part.condition.to(device)
        with torch.no_grad():
            x_B = x_t(ensemble.path, part.x_0, part.eps, part.t_B)
            # Routers and labels are on the CPU, experts on the ensemble's device, the student on the engine's.
            weights_BK = self.weights(x_B.cpu(), part).to(x_B.dtype)
            u_B = mix_velocity(
                self._experts(),
                x_B.to(device),
                part.t_B.to(device),
                weights_BK.to(device),
                condition_B,
                chunk_size=ensemble.chunk_size,
            )
            # The loop makes x_t of them again, the same, and their velocity is the teacher's.
            x_0, eps = x_0_and_eps(ensemble.path, x_B, u_B.to(x_B), part.t_B)
        return replace(part, x_0=x_0, eps=eps)

    def _experts(self) -> Sequence[Expert]:
        return [self._in_precision(number) for number in range(len(self.ensemble.experts))]

    def _in_precision(self, number: int) -> Expert:
        def velocity(x_B: Tensor, *rest_B: Tensor) -> Tensor:
            in_bf16 = computes_in_bf16(self.precision, x_B.device)
            with torch.autocast(x_B.device.type, torch.bfloat16, enabled=in_bf16):
                return self.ensemble.experts[number](x_B, *rest_B).to(x_B)

        return velocity


def teaching(
    ensemble: Ensemble,
    data: DistillationData,
    teacher: Teacher,
    *,
    source: str,
    precision: Precision = "fp32",
) -> Teaching:
    """Return the teacher, after checking that the ensemble and the data have what it needs; see `distill`."""
    if tuple(data.images.shape[1:]) != tuple(ensemble.shape):
        raise ShapeError(
            "images", expected=str(tuple(ensemble.shape)), got=str(tuple(data.images.shape[1:]))
        )
    if data.labels is not None:
        check_labels(data.labels, ensemble.condition)
    digest = hashlib.sha256(json.dumps([teacher, source]).encode())
    match teacher:
        case "label":
            weights = _by_label(data, len(ensemble.experts))
            # Checkpoints of other labels are of another run.
            digest.update(torch.as_tensor(data.expert_N).contiguous().numpy().data)
        case "mixture" | "drawn":
            weights = _by_posterior(ensemble, data, drawn=teacher == "drawn")
        case _:
            assert_never(teacher)
    return Teaching(ensemble, weights, digest.hexdigest(), precision)


def _by_label(data: DistillationData, num_experts: int) -> ExpertWeights:
    expert_N = data.expert_N
    if expert_N is None:
        raise MathError(
            "teacher label",
            expected="the expert of each image",
            got="images whose experts are unknown",
            remedy="Choose the teacher drawn or mixture.",
        )
    if not 0 <= int(expert_N.min()) <= int(expert_N.max()) < num_experts:
        raise ShapeError(
            "labels",
            expected=f"experts 0 to {num_experts - 1}",
            got=f"{int(expert_N.min())} to {int(expert_N.max())}",
        )

    def own_expert(x_B: Tensor, batch: Batch) -> Tensor:
        # The batch names its images by their number in the whole training data.
        image_B = torch.as_tensor(batch.chosen_B).cpu()
        return one_hot(expert_N[image_B], num_experts)

    return own_expert


def _by_posterior(ensemble: Ensemble, data: DistillationData, *, drawn: bool) -> ExpertWeights:
    """Weigh experts by the posterior at x_t given each image's condition."""
    posterior = Posterior.of(ensemble, data.labels)
    if posterior.lacks_router:
        raise MathError(
            "teacher's posterior",
            expected="a router",
            got="an ensemble without a router",
            remedy="Choose the teacher label.",
        )

    def whole_mixture(x_B: Tensor, batch: Batch) -> Tensor:
        condition_B = None
        if batch.condition is not None:
            condition_B = batch.condition.cpu()
        return posterior(x_B, batch.t_B.cpu(), condition_B)

    def drawn_expert(x_B: Tensor, batch: Batch) -> Tensor:
        # Numbers of this training step, so that a run which continues from a checkpoint draws the same experts.
        uniform_B = torch.as_tensor(batch.uniform_B).cpu()
        expert_B = draw_expert(whole_mixture(x_B, batch), uniform_B)
        return one_hot(expert_B, len(ensemble.experts))

    if drawn:
        return drawn_expert
    return whole_mixture
