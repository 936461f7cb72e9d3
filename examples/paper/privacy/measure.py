"""Cross-entropy, accuracy and share error of a router over test images, at each noise level."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath, x_t
from ddm.routers.base import Router, posterior
from examples.paper.privacy.worlds import PrivateWorld

TIMES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_BLOCK = 2500
_NOISE_SEED = 20_000  # the same noise for every router, so that they are compared in pairs


@dataclass(frozen=True)
class RouterMeasurements:
    """One router on one world; all averages are over test images.

    Attributes:
        loss_TN: cross-entropy of each image at each time, nats, against its exact p(k | class).
        accuracy_T: how often the likeliest silo is the one that the image comes from.
        share_error_T: total variation distance of the mean posterior from the mean of p(k | class).
    """

    loss_TN: Tensor
    accuracy_T: list[float]
    share_error_T: list[float]

    @property
    def loss_T(self) -> list[float]:
        """Mean cross-entropy at each time."""
        return self.loss_TN.mean(1).tolist()


@torch.inference_mode()
def measure(router: Router | None, world: PrivateWorld) -> RouterMeasurements:
    """Measure a router, or the prior where it is None."""
    soft_NK = world.soft_NK
    log_prior_K = world.prior_K.log()
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    losses = []
    accuracy_T = []
    share_error_T = []
    for t in TIMES:
        noise = torch.randn(world.test.shape, generator=generator)
        t_N = torch.full((len(world.test),), t)
        x = x_t(LinearPath(), world.test, noise, t_N)
        blocks = zip(x.split(_BLOCK), t_N.split(_BLOCK), strict=True)  # type: ignore[no-untyped-call]
        w_NK = (
            torch.cat([posterior(router, *block, log_prior_K).double() for block in blocks])
            if router
            else world.prior_K.expand_as(soft_NK)
        )
        losses.append(-(soft_NK * w_NK.clamp(min=1e-30).log()).sum(1))
        accuracy_T.append(float(soft_NK.gather(1, w_NK.argmax(1, keepdim=True)).mean()))
        share_error_T.append(float((w_NK.mean(0) - soft_NK.mean(0)).abs().sum() / 2))
    return RouterMeasurements(torch.stack(losses), accuracy_T, share_error_T)
