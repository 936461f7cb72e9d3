"""Teachers told a text: where the router reads it, an image's posterior is that given its own text, in closed form."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath, velocity, x_t
from ddm.distillation.dataset import DistillationData, SampleRecipe, own_samples
from ddm.distillation.distill import Teacher, teaching
from ddm.ensemble import Ensemble
from ddm.protocol.architecture import TextCondition
from ddm.routers.base import Router
from ddm.training.batches import Batch
from tests.ddm.distillation.test_dataset import batch_of
from tests.support.gaussian_mixture import GaussianMixture, four_silos

# Shape legend: B batch, C components, D dimensions, K experts, L tokens.

MIXTURE = four_silos()
# of each component: the first two silos have both texts, the others one
TEXT_C = torch.tensor([1, 2, 2, 1, 2, 2, 1])
CONDITION = TextCondition(dim=1, max_tokens=1, drop=0.25)


def read(text_BLD: Tensor) -> Tensor:
    """Which text each row is, 0 for none."""
    return text_BLD[:, 0, 0].round().long()


def of_text(text: int) -> GaussianMixture:
    """The data that fit one text; all of them without a text."""
    return replace(MIXTURE, weight_C=MIXTURE.weight_C * (text == TEXT_C)) if text else MIXTURE


class Told:
    """The exact expert of a silo, told a text of each sample."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, x_BD: Tensor, t_B: Tensor, c_BLD: Tensor) -> Tensor:
        answer_BD = torch.empty_like(x_BD)
        for text in read(c_BLD).unique().tolist():
            rows = read(c_BLD) == text
            answer_BD[rows] = (
                of_text(text).expert(self.k)(x_BD[rows], t_B[rows]).nan_to_num().to(x_BD)
            )
        return answer_BD


@dataclass(frozen=True)
class Given:
    """Who could have made x_t of each sample's text; a silo without the text hardly ever."""

    text_B: Tensor
    num_experts: int = 4

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        rows = [
            of_text(int(c)).log_likelihood(x_B[i, None], t_B[i, None])[0]
            for i, c in enumerate(self.text_B)
        ]
        return torch.stack(rows).nan_to_num(nan=-1e3, neginf=-1e3)


@dataclass(frozen=True)
class Reading:
    """A router that reads the text, and may know whose data fit it."""

    knows_shares: bool = True
    num_experts: int = 4

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return MIXTURE.log_likelihood(x_B, t_B)

    def given(self, condition_B: Tensor) -> Router:
        return Given(read(condition_B))

    def log_shares(self, condition_B: Tensor) -> Tensor:
        prior_K = torch.tensor(MIXTURE.prior_K)
        rows = [torch.tensor(of_text(int(c)).prior_K) / prior_K for c in read(condition_B)]
        return torch.stack(rows).log()


def ensemble(router: Router | None) -> Ensemble:
    return Ensemble(
        [Told(k) for k in range(4)], router, MIXTURE.prior_K, shape=(2,), condition=CONDITION
    )


def data(num: int) -> DistillationData:
    """The mixture's own data, each point with its text, a quarter with none."""
    x_ND = MIXTURE.draw(num, 0)
    text_N = TEXT_C[MIXTURE.log_joint(x_ND, torch.zeros(num), MIXTURE.weight_C).argmax(-1)].clone()
    text_N[::4] = 0
    return DistillationData(x_ND.float(), None, text_N.float()[:, None, None], drop=0.25)


def answers(of: Ensemble, teacher: Teacher, batch: Batch, lessons: DistillationData) -> Tensor:
    shown = teaching(of, lessons, teacher, source="test")(batch)
    return velocity(LinearPath(), shown.x_0, shown.eps, shown.t_B)


def truth(x_BD: Tensor, t_B: Tensor, text_B: Tensor, *, equal_shares: bool = False) -> Tensor:
    """The velocity of all data of each text; with `equal_shares` as if every silo had its prior share of it."""
    found_BD = torch.empty_like(x_BD)
    for text in (0, 1, 2):
        rows = text_B == text
        mixture = of_text(text)
        if equal_shares and text:
            scale_K = torch.tensor(MIXTURE.prior_K) / torch.tensor(mixture.prior_K)
            held = replace(
                mixture,
                weight_C=(mixture.weight_C * scale_K[mixture.silo_C]).nan_to_num(posinf=0.0),
            )
            mixture = held
        found_BD[rows] = mixture.velocity(x_BD[rows], t_B[rows]).to(x_BD)
    return found_BD


def test_teachers_weigh_experts_by_the_posterior_given_each_images_text() -> None:
    lessons = data(600)
    batch = batch_of(lessons)
    assert batch.condition is not None
    x_BD = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    text_B = read(batch.condition)
    expected_BD = truth(x_BD, batch.t_B, text_B)
    found_BD = answers(ensemble(Reading()), "mixture", batch, lessons)
    torch.testing.assert_close(found_BD, expected_BD, atol=2e-3, rtol=1e-3)
    drawn_BD = answers(ensemble(Reading()), "drawn", batch, lessons)
    score_D = (drawn_BD - expected_BD).mean(0) / (
        (drawn_BD - expected_BD).std(0) / len(x_BD) ** 0.5
    )
    assert float(score_D.abs().max()) < 4.5
    has_text = text_B > 0
    blind_BD = answers(ensemble(MIXTURE), "mixture", batch, lessons)  # a router that reads no text
    assert float((blind_BD - expected_BD)[has_text].abs().mean()) > 0.05
    torch.testing.assert_close(blind_BD[~has_text], expected_BD[~has_text], atol=2e-3, rtol=1e-3)


def test_router_that_reads_texts_without_knowing_who_has_them_takes_the_prior_for_their_shares() -> (
    None
):
    lessons = data(400)
    batch = batch_of(lessons)
    assert batch.condition is not None
    x_BD = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    text_B = read(batch.condition)
    expected_BD = truth(x_BD, batch.t_B, text_B, equal_shares=True)
    found_BD = answers(ensemble(Reading(knows_shares=False)), "mixture", batch, lessons)
    torch.testing.assert_close(found_BD, expected_BD, atol=2e-3, rtol=1e-3)
    assert float((found_BD - truth(x_BD, batch.t_B, text_B)).abs().max()) > 0.05


@pytest.mark.parametrize("knows", [True, False])
def test_own_samples_of_a_text_are_drawn_from_experts_that_have_it_where_the_router_knows(
    tmp_path: Path, knows: bool
) -> None:
    texts = torch.tensor([1.0, 2.0])[:, None, None]
    readers = ensemble(Reading(knows_shares=knows))
    recipe = SampleRecipe(source="x", condition=CONDITION, texts=texts, steps=2)
    drawn = own_samples(readers, 1024, tmp_path, recipe, on_progress=lambda steps, total: None)
    assert drawn.labels is not None and drawn.expert_N is not None
    for text in (0, 1, 2):
        rows = read(drawn.labels) == text
        share_K = torch.bincount(drawn.expert_N[rows], minlength=4) / int(rows.sum())
        prior = torch.tensor(of_text(text if knows else 0).prior_K)
        assert float((share_K - prior / prior.sum()).abs().max()) < 0.09
