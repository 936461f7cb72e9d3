"""Labelled images, on which a router learns: whose data each image resembles, and how often it is drawn.

An image is in a *cell*, within which nothing tells the experts apart: a public group, a class and a group, or simply
one expert. With p(j | e) the share of expert e's data in cell j, and all experts equally probable, an image of cell j
is of expert e with the probability ``p(j | e) / sum_e' p(j | e')``, and cell j has the weight ``sum_e p(j | e) / E``.
A network trained with these targets and weights answers likelihoods, to which any prior can be added.

The shares come from statistics that the silos have released, and the labels belong to public images, so that labelling
costs no privacy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddm.errors import DataError, ShapeError
from ddm.partition.layout import Layout

# Shape legend: E experts, K silos, J cells, N images, C classes, G public groups.

_HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Labelled:
    """Labelled images.

    Attributes:
        images: shape (N, ...).
        cell_N: the cell of each.
        target_JE: the probability of each expert in a cell, float32; rows sum to 1.
        weight_N: how often each image is drawn, in any unit.
        condition_N: the class or text of each, (N,) or (N, L, D); None where the router reads none.
    """

    images: Tensor
    cell_N: Tensor
    target_JE: Tensor
    weight_N: Tensor
    condition_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return self.target_JE.shape[1]

    @classmethod
    def of_cells(
        cls,
        images: Tensor,
        cell_N: Tensor,
        share_EJ: Tensor,
        condition_N: Tensor | None = None,
    ) -> "Labelled":
        """Label images by the experts' shares of their cells; those in cells that nobody has data in are left out.

        Args:
            images: shape (N, ...).
            cell_N: the cell of each.
            share_EJ: p(j | e), rows summing to 1.
            condition_N: the class or text of each.

        Raises:
            ShapeError: not one cell per image.
            DataError: no image lies where some expert has data.
        """
        num_experts, num_cells = share_EJ.shape
        if len(cell_N) != len(images):
            got = f"{len(cell_N)} for {len(images)} images"
            raise ShapeError("labels", expected="one label for each image", got=got)
        size_J = torch.bincount(cell_N, minlength=num_cells)
        share_EJ = share_EJ.double()
        has_images_J = size_J > 0
        # An expert whose cells have no image would be the target of none, so that no sample would ever follow it.
        share_with_images_E = share_EJ[:, has_images_J].sum(1)
        num_without = int((share_with_images_E <= 0).sum())
        if num_without:
            raise DataError(
                "labelled images",
                expected=f"images like those of each of {num_experts} experts",
                got=f"none for {num_without} of them",
                remedy="Label public images of every silo, or train the router on images that the experts draw.",
            )
        total_J = share_EJ.sum(0)
        weight_J = total_J / num_experts
        # A cell in which nobody has data has no posterior. Its row stays 0, and its weight of 0 leaves its images out.
        posterior_EJ = share_EJ / total_J.clamp(min=1e-300)
        target_JE = posterior_EJ.T.float()
        # Images of a cell divide its weight, so that it does not matter how many of them the public data happen to
        # have.
        weight_N = (weight_J / size_J.clamp(min=1))[cell_N]
        has_weight_N = weight_N > 0
        if condition_N is not None:
            condition_N = condition_N[has_weight_N]
        return cls(
            images=images[has_weight_N],
            cell_N=cell_N[has_weight_N],
            target_JE=target_JE,
            weight_N=weight_N[has_weight_N],
            condition_N=condition_N,
        )

    @classmethod
    def of_experts(
        cls,
        images: Tensor,
        expert_N: Tensor,
        num_experts: int,
        condition_N: Tensor | None = None,
    ) -> "Labelled":
        """Label images whose experts are known, shape (N,)."""
        return cls.of_cells(images, expert_N, torch.eye(num_experts), condition_N)

    @classmethod
    def drawn(cls, drawn_EN: Tensor, condition_EN: Tensor | None = None) -> "Labelled":
        """Label equally many images of each expert, shape (E, N, ...)."""
        num_experts, num = drawn_EN.shape[:2]
        expert_N = torch.arange(num_experts).repeat_interleave(num)
        condition_N = None
        if condition_EN is not None:
            condition_N = condition_EN.flatten(0, 1)
        return cls.of_experts(drawn_EN.flatten(0, 1), expert_N, num_experts, condition_N)

    def draw(self, num: int, generator: torch.Generator) -> Tensor:
        """Return the numbers of images drawn by weight."""
        # By inversion: torch.multinomial takes at most 2^24 images.
        edge_N = self.weight_N.cumsum(0)
        uniform = torch.rand(num, generator=generator, dtype=torch.float64)
        rows = torch.searchsorted(edge_N, uniform * edge_N[-1], right=True)
        # Rounding may move a number onto the last edge, beyond which there is no image.
        return rows.clamp(max=len(self) - 1)

    def divided(self, generator: torch.Generator) -> tuple["Labelled", "Labelled"]:
        """Return the images to train on, and those to check the training on: one in ten of each cell.

        Raises:
            ShapeError: a cell that only one expert has data in, with a single image.
        """
        random_N = torch.randperm(len(self), generator=generator)
        # The stable sort brings the images of a cell together and leaves their random order as it is.
        by_cell_N = self.cell_N[random_N].argsort(stable=True)
        order_N = random_N[by_cell_N]
        size_J = torch.bincount(self.cell_N, minlength=len(self.target_JE))
        has_one_image_J = size_J == 1
        has_one_expert_J = self.target_JE.amax(1) == 1
        if bool((has_one_image_J & has_one_expert_J).any()):
            expected = "at least 2 of each expert"
            raise ShapeError("labelled images", expected=expected, got="only 1 of some experts")
        first_J = size_J.cumsum(0) - size_J
        sorted_J = self.cell_N[order_N]
        place_N = torch.arange(len(self)) - first_J[sorted_J]
        # The only image of a cell is trained on, since other cells show the same experts.
        num_check_J = (_HELD_OUT_SHARE * size_J).round().clamp(min=1)
        num_check_J = num_check_J.where(size_J > 1, 0)
        checked_N = place_N < num_check_J[sorted_J]
        if not bool(checked_N.any()):
            got = f"{len(self)} images, each alone in its cell"
            raise ShapeError(
                "labelled images", expected="at least one cell with several images", got=got
            )
        train_rows = order_N[~checked_N].sort().values
        check_rows = order_N[checked_N].sort().values
        return self._of(train_rows), self._of(check_rows)

    def _of(self, rows: Tensor) -> "Labelled":
        condition_N = None
        if self.condition_N is not None:
            condition_N = self.condition_N[rows]
        return replace(
            self,
            images=self.images[rows],
            cell_N=self.cell_N[rows],
            weight_N=self.weight_N[rows],
            condition_N=condition_N,
        )


def class_shares(count_KCG: Tensor, layout: Layout) -> Tensor:
    """Return each expert's shares of the cells of classes and groups, ``j = c G + g``, shape (E, C G).

    Args:
        count_KCG: each silo's estimated counts.
        layout: the experts.
    """
    num_groups = count_KCG.shape[2]
    own_EG = _covered(layout, num_groups)
    # An expert has learned the groups of its part alone; those of the silo's other experts count as 0 for it.
    count_ECG = count_KCG[list(layout.silo_E)] * own_EG[:, None]
    total_E11 = count_ECG.sum((1, 2), keepdim=True)
    share_ECG = count_ECG / total_E11
    return share_ECG.flatten(1)


def silo_shares(
    silo_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    layout: Layout,
) -> Tensor:
    """Return each expert's shares of the cells of silos and groups, ``j = k G + g``, shape (E, K G), by the images.

    Args:
        silo_N: the silo that each public image is said to be of.
        group_N: its public group, which decides on the expert where a silo has several.
        num_groups: G.
        layout: the experts.
    """
    num_silos = max(layout.silo_E) + 1
    cell_N = silo_N * num_groups + group_N
    count_J = torch.bincount(cell_N, minlength=num_silos * num_groups).double()
    count_KG = count_J.view(num_silos, num_groups)
    one_hot_KK = torch.eye(num_silos, dtype=torch.float64)
    own_EK = one_hot_KK[list(layout.silo_E)]
    own_EG = _covered(layout, num_groups)
    count_EKG = own_EK[:, :, None] * own_EG[:, None] * count_KG
    # An expert whose cells have no image gets shares of 0, which `Labelled.of_cells` refuses.
    total_E11 = count_EKG.sum((1, 2), keepdim=True).clamp(min=1e-300)
    share_EKG = count_EKG / total_E11
    return share_EKG.flatten(1)


def _covered(layout: Layout, num_groups: int) -> Tensor:
    """Return whether each expert covers each group, shape (E, G), float64."""
    own_EG = torch.zeros(len(layout.parts), num_groups, dtype=torch.float64)
    for e, part in enumerate(layout.parts):
        own_EG[e, list(part.groups)] = 1.0
    return own_EG


def classes_of_experts(
    share_EJ: Tensor,
    num_classes: int,
    num: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw the classes under which each expert draws, by its shares of the classes, shape (E, num).

    Args:
        share_EJ: as `class_shares` returns them.
        num_classes: C.
        num: classes for each expert.
        generator: draws them.
    """
    share_EC = share_EJ.view(len(share_EJ), num_classes, -1).sum(2)
    return torch.multinomial(share_EC, num, replacement=True, generator=generator)


def texts_of_experts(
    texts_NLD: Tensor,
    num_experts: int,
    num: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw the texts under which each expert draws, from public ones, shape (E, num, L, D)."""
    # Every expert draws from the same captions, since no statistic says which silo has which texts.
    return texts_NLD[torch.randint(len(texts_NLD), (num_experts, num), generator=generator)]


def numbered(names: Sequence[str], order: Sequence[str]) -> Tensor:
    """Return the place of each name in `order`, -1 for others, int64."""
    place = {name: number for number, name in enumerate(order)}
    return torch.tensor([place.get(name, -1) for name in names], dtype=torch.int64)
