"""Students that are told what experts are told: of closed-form experts with classes, what they learn given a class."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import LinearPath, velocity, x_t
from ddm.distillation.dataset import DistillationData, SampleRecipe, own_samples, read_labels
from ddm.distillation.distill import Teacher, teaching
from ddm.ensemble import Ensemble
from ddm.errors import DataError, MathError, SetupError, ShapeError
from ddm.protocol.architecture import ClassCondition, NoCondition, TextCondition
from ddm.sampling.guidance import ClassPrior
from ddm.training.batches import Batch
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, four_silos

# Shape legend: B batch, C components, N images, D dimensions.

MIXTURE = four_silos()
# of each component: the first two silos have both classes
CLASS_C = torch.tensor([0, 1, 1, 0, 1, 1, 0])
CONDITION = ClassCondition(num_classes=2, drop=0.25)


class Conditional:
    """The exact expert of a silo, told a class of each sample, or -1."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, x_BD: Tensor, t_B: Tensor, c_B: Tensor) -> Tensor:
        own_C = MIXTURE.weights_of(self.k)
        answer_BD = torch.empty_like(x_BD)
        for label in set(c_B.tolist()):
            rows = c_B == label
            weight_C = own_C if label < 0 else own_C * (label == CLASS_C)
            answer_BD[rows] = MIXTURE.velocity_under(weight_C)(x_BD[rows], t_B[rows])
        return answer_BD


def of_class(label: int) -> GaussianMixture:
    """The data of one class."""
    return replace(MIXTURE, weight_C=MIXTURE.weight_C * (label == CLASS_C))


class OfClass:
    """Who could have made x_t of a class; a silo without the class never."""

    num_experts = 4

    def __init__(self, label: int) -> None:
        self.mixture = of_class(label)

    def log_likelihood(self, x_B: Tensor, t_B: Tensor) -> Tensor:
        return self.mixture.log_likelihood(x_B, t_B).nan_to_num(nan=-1e3, neginf=-1e3)


def class_prior(label: int) -> ClassPrior:
    return ClassPrior(of_class(label).prior_K, OfClass(label))


def ensemble() -> Ensemble:
    experts = [Conditional(k) for k in range(4)]
    return Ensemble(
        experts,
        MIXTURE,
        MIXTURE.prior_K,
        shape=(2,),
        condition=CONDITION,
        class_prior=class_prior,
        chunk_size=4096,
    )


def component_of(x_ND: Tensor) -> Tensor:
    return MIXTURE.log_joint(x_ND, torch.zeros(len(x_ND)), MIXTURE.weight_C).argmax(-1)


def data(num: int) -> DistillationData:
    """The mixture's own data, each point with its silo and its class, a quarter with none."""
    x_ND = MIXTURE.draw(num, 0)
    label_N = CLASS_C[component_of(x_ND)].clone()
    label_N[::4] = -1
    return DistillationData(x_ND.float(), MIXTURE.silo_of(x_ND), label_N, drop=0.25)


def batch_of(lessons: DistillationData) -> Batch:
    random = torch.Generator().manual_seed(5)
    num = len(lessons.images)
    eps = torch.randn(num, 2, generator=random)
    t_B = torch.rand(num, generator=random)
    uniform_B = torch.rand(num, generator=random, dtype=torch.float64)
    return Batch(lessons.images, eps, t_B, lessons.labels, None, torch.arange(num), uniform_B)


def truth(x_BD: Tensor, t_B: Tensor, told_B: Tensor) -> Tensor:
    """The velocity of all data of each sample's class."""
    found_BD = torch.empty_like(x_BD)
    for label in (-1, 0, 1):
        rows = told_B == label
        mixture = MIXTURE if label < 0 else of_class(label)
        found_BD[rows] = mixture.velocity(x_BD[rows], t_B[rows]).to(x_BD)
    return found_BD


def answers(lessons: DistillationData, teacher: Teacher, batch: Batch) -> Tensor:
    shown = teaching(ensemble(), lessons, teacher, source="test")(batch)
    return velocity(LinearPath(), shown.x_0, shown.eps, shown.t_B)


def standard_scores(difference_BD: Tensor, x_BD: Tensor, t_B: Tensor, told_B: Tensor) -> Tensor:
    """How many standard errors the mean of a difference is from 0, weighted by functions of x_t, t and class."""
    waves = [x_BD[:, 0], x_BD[:, 1], t_B, *((told_B == label).float() for label in (-1, 0, 1))]
    product_FBD = torch.stack(waves)[..., None] * difference_BD
    return product_FBD.mean(1) / (product_FBD.std(1) / len(t_B) ** 0.5)


def test_mixture_given_each_samples_class_is_exact_and_given_another_is_not() -> None:
    lessons = data(2000)
    batch = batch_of(lessons)
    assert batch.condition is not None
    x_BD = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    expected = truth(x_BD, batch.t_B, batch.condition)
    torch.testing.assert_close(answers(lessons, "mixture", batch), expected, atol=2e-3, rtol=1e-3)
    other = replace(batch, condition=batch.condition.roll(1))
    assert float((answers(lessons, "mixture", other) - expected).abs().mean()) > 0.1


@pytest.mark.parametrize("teacher", ["label", "drawn"])
def test_one_experts_answer_given_the_class_means_the_mixture_given_the_class(
    teacher: Teacher,
) -> None:
    lessons = data(20_000)
    batch = batch_of(lessons)
    assert batch.condition is not None
    x_BD = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    expected = truth(x_BD, batch.t_B, batch.condition)
    actual = answers(lessons, teacher, batch)
    assert float((actual - expected).abs().max()) > 0.1, "of each x_t it is an estimate"
    assert (
        float(standard_scores(actual - expected, x_BD, batch.t_B, batch.condition).abs().max())
        < 4.5
    )
    untold = truth(x_BD, batch.t_B, torch.full_like(batch.condition, -1))
    assert (
        float(standard_scores(actual - untold, x_BD, batch.t_B, batch.condition).abs().max()) > 20
    ), "the class tells"


def drawn(folder: Path, num: int = 2048, **changes: object) -> DistillationData:
    fields = {"source": "x", "condition": CONDITION, "steps": 16} | changes
    recipe = SampleRecipe(**fields)  # type: ignore[arg-type]
    return own_samples(ensemble(), num, folder, recipe, on_progress=lambda steps, total: None)


def test_own_samples_have_the_class_they_are_told_and_those_told_none_have_the_law_of_the_whole(
    tmp_path: Path,
) -> None:
    lessons = drawn(tmp_path)
    assert lessons.labels is not None and lessons.expert_N is not None
    assert lessons.drop == 0, "what was drawn under a class is not shown as if it were under none"
    component_N = component_of(lessons.images.double())
    is_labelled = lessons.labels >= 0
    assert float((CLASS_C[component_N] == lessons.labels)[is_labelled].double().mean()) > 0.97
    assert (
        float((MIXTURE.silo_of(lessons.images.double()) == lessons.expert_N).double().mean()) > 0.95
    )
    assert float((~is_labelled).double().mean()) == pytest.approx(0.25, abs=0.04)
    for rows, prior in (
        (~is_labelled, MIXTURE.prior_K),
        (lessons.labels == 1, of_class(1).prior_K),
    ):
        share_K = torch.bincount(lessons.expert_N[rows], minlength=4) / int(rows.sum())
        expected_K = torch.tensor(prior) / sum(prior)
        assert float((share_K - expected_K).abs().max()) < 0.07
    again = drawn(tmp_path, num=300)
    assert torch.equal(again.images, lessons.images[:300]) and again.labels is not None
    assert torch.equal(again.labels, lessons.labels[:300])


class TextReader:
    """An expert that answers how much text it is told."""

    def __call__(self, x_BD: Tensor, t_B: Tensor, c_BLD: Tensor) -> Tensor:
        return x_BD * 0 + c_BLD.sum((1, 2))[:, None]


def test_own_samples_of_readers_are_told_the_texts_given_or_none(tmp_path: Path) -> None:
    condition = TextCondition(dim=3, max_tokens=2, drop=0.5)
    readers = Ensemble([TextReader()] * 2, None, [1.0, 3.0], shape=(2,), condition=condition)
    texts = torch.arange(1.0, 5.0)[:, None, None].expand(4, 2, 3)
    recipe = SampleRecipe(source="x", condition=condition, texts=texts, steps=2)
    lessons = own_samples(readers, 512, tmp_path, recipe, on_progress=lambda steps, total: None)
    assert lessons.labels is not None and lessons.expert_N is not None
    totals, counts = np.unique(lessons.labels[:, 0, 0].numpy(), return_counts=True)
    assert totals.tolist() == [0, 1, 2, 3, 4]
    assert counts[0] / 512 == pytest.approx(0.5, abs=0.08) and counts[1:].min() > 35
    noise = lessons.images + lessons.labels.sum((1, 2))[:, None]  # the constant velocity, undone
    assert float(noise.mean()) == pytest.approx(0, abs=0.15)
    targets = teaching(readers, lessons, "label", source="x")(batch_of(lessons))
    assert torch.allclose(
        targets.eps - targets.x_0, lessons.labels.sum((1, 2))[:, None].expand(512, 2), atol=1e-4
    )
    with pytest.raises(SetupError, check=has_subject("texts")):
        own_samples(
            readers,
            5,
            tmp_path,
            replace(recipe, texts=None),
            on_progress=lambda steps, total: None,
        )


def test_classes_that_nobody_is_known_to_hold_are_refused_unless_the_teacher_needs_no_holder(
    tmp_path: Path,
) -> None:
    unknown = replace(ensemble(), class_prior=None)
    lessons = data(50)
    with pytest.raises(MathError, check=has_subject("classes")):
        own_samples(
            unknown,
            5,
            tmp_path,
            SampleRecipe(source="x", condition=CONDITION),
            on_progress=lambda steps, total: None,
        )
    for teacher in ("drawn", "mixture"):
        with pytest.raises(MathError, check=has_subject("classes")):
            teaching(unknown, lessons, teacher, source="x")  # type: ignore[arg-type]
    assert teaching(unknown, lessons, "label", source="x")


def test_conditions_that_experts_do_not_have_are_refused() -> None:
    lessons = data(50)
    for labels in (
        torch.full((50,), 2),
        torch.full((50,), -2),
        torch.zeros(50),
        torch.zeros(50, 1, 3),
    ):
        with pytest.raises(ShapeError, check=has_subject("classes")):
            teaching(ensemble(), replace(lessons, labels=labels), "label", source="x")
    plain = Ensemble(MIXTURE.experts(), MIXTURE, MIXTURE.prior_K, shape=(2,))
    with pytest.raises(ShapeError, check=has_subject("conditions")):
        teaching(plain, lessons, "label", source="x")
    with pytest.raises(ShapeError, match="one per image"):
        DistillationData(lessons.images, labels=torch.zeros(49, dtype=torch.int64))


def test_labels_are_read_as_the_condition_says_and_refused_otherwise(tmp_path: Path) -> None:
    def saved(**arrays: np.ndarray) -> Path:
        np.savez(tmp_path / "labels.npz", **arrays)  # type: ignore[arg-type]
        return tmp_path / "labels.npz"

    assert read_labels(saved(labels=np.array([1, -1, 0], np.int32)), CONDITION).tolist() == [
        1,
        -1,
        0,
    ]
    texts = TextCondition(dim=3, max_tokens=2)
    assert read_labels(saved(labels=np.ones((4, 2, 3))), texts).dtype == torch.float32
    for wrong in (np.array([0.5]), np.array([], np.int64), np.int64(1)):
        with pytest.raises(DataError, check=has_subject("labels")):
            read_labels(saved(labels=wrong), CONDITION)
    with pytest.raises(ShapeError, check=has_subject("classes")):
        read_labels(saved(labels=np.array([2])), CONDITION)
    for shape in ((4, 3, 3), (4, 2, 5), (4, 6)):
        with pytest.raises(ShapeError, check=has_subject("text")):
            read_labels(saved(labels=np.ones(shape)), texts)
    for number in (np.nan, 1e300):  # the latter becomes infinite in single precision
        with pytest.raises(DataError, check=has_subject("labels")):
            read_labels(saved(labels=np.full((1, 2, 3), number)), texts)
    with pytest.raises(DataError, check=has_subject("data file")):
        read_labels(saved(images=np.ones(3)), CONDITION)
    with pytest.raises(ShapeError, check=has_subject("conditions")):
        read_labels(saved(labels=np.ones(3)), NoCondition())
