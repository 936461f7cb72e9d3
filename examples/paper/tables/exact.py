"""The oracle of routers: what the training images themselves say."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddm.sampling.guidance import ClassPrior, ClassPriors

# Shape legend: B batch, N images, K experts.

# log-likelihood of a class that an expert has no image of; its prior given that class is 0
_NEVER = -1e30


class ExactRouter:
    """The exact posterior of the training images themselves: ``p(x_t | k) = mean_i N(x_t; alpha x_i, sigma^2)``.

    No network can know it better; it costs a product with all training images at every step.

    Args:
        images_K: each expert's images; an expert may have none.
    """

    def __init__(self, images_K: Sequence[Tensor]) -> None:
        self.num_experts = len(images_K)
        self._images_K = [images.flatten(1) for images in images_K]
        self._squared_K = [rows.square().sum(1) for rows in self._images_K]

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        """See `ddm.routers.base.Router`."""
        rows_B = x_B.flatten(1).float()
        t_B1 = t_B.float()[:, None]
        alpha_B1 = 1 - t_B1
        precision_B1 = 0.5 / t_B1.clamp(min=1e-2).square()
        log_densities = []
        for images, squared in zip(self._images_K, self._squared_K, strict=True):
            if not len(images):
                log_densities.append(torch.full_like(rows_B[:, 0], _NEVER))
                continue
            images = images.to(rows_B.device)
            squared = squared.to(rows_B.device)
            near_BN = precision_B1 * (
                2 * alpha_B1 * rows_B @ images.T - alpha_B1.square() * squared
            )
            log_densities.append(near_BN.logsumexp(1) - torch.tensor(float(len(images))).log())
        return torch.stack(log_densities, 1)


def exact_class_priors(images_K: Sequence[Tensor], label_KN: Sequence[Tensor]) -> ClassPriors:
    """Return the exact shares of each class, with the exact router given the class.

    Args:
        images_K: each expert's images.
        label_KN: the classes of each expert's images.
    """

    def of(number: int) -> ClassPrior:
        own_K = [
            images[label_N == number] for images, label_N in zip(images_K, label_KN, strict=True)
        ]
        return ClassPrior([float(len(own)) for own in own_K], ExactRouter(own_K))

    return of
