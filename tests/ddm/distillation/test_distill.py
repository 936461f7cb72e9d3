"""A student of closed-form experts: whom it is taught by, what it learns, what it keeps, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import LinearPath, PathName, Velocity, path_named, velocity, x_t
from ddm.distillation.dataset import DistillationData, SampleRecipe, by_cluster, own_samples
from ddm.distillation.distill import Teacher, distill, teaching
from ddm.ensemble import Ensemble
from ddm.errors import DataError, MathError, NumericalError, SetupError, ShapeError
from ddm.loading.ensemble import on_path
from ddm.loading.plan import PlanFiles
from ddm.partition.clustering import Clusters
from ddm.protocol.base import File
from ddm.protocol.learning import ExpertObjective, Training
from ddm.protocol.manifest import PublishedExpert
from ddm.training.batches import Batch
from ddm.training.config import Engine
from ddm.training.loop import FinishedTraining, TrainingRun
from tests.ddm.training.test_objectives import LEARNED, exact_expert
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import GaussianMixture, UninformedRouter, four_silos

# Shape legend: B batch, K experts, N images, D dimensions, F test functions.

MIXTURE = four_silos()
BOUND = 0.25  # relative error that a student of a few seconds stays below


def ensemble_of(mixture: GaussianMixture = MIXTURE) -> Ensemble:
    """The exact experts and the exact router."""
    return Ensemble(mixture.experts(), mixture, mixture.prior_K, shape=(2,))


def blind() -> Ensemble:
    """The same experts under a router that knows nothing and equal priors: the wrong target."""
    return replace(ensemble_of(), router=UninformedRouter(4), prior=[1.0] * 4)


def data(num: int, seed: int = 0) -> DistillationData:
    """The mixture's own data, each point with the silo that it was drawn from."""
    x_ND = MIXTURE.draw(num, seed)
    return DistillationData(x_ND.float(), MIXTURE.silo_of(x_ND))


class Small(nn.Module):
    """A small network in the plane."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("waves", torch.tensor([0.5, 1.0, 2.0, 4.0]))
        self.layers = nn.Sequential(
            nn.Linear(27, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x_BD: Tensor, t_B: Tensor) -> Tensor:
        point = torch.cat([x_BD, t_B[:, None]], dim=1)
        phase = (point[..., None] * self.waves).flatten(1)
        answer: Tensor = self.layers(torch.cat([point, phase.sin(), phase.cos()], dim=1))
        return answer


def small() -> Small:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Small()


def settings(num_steps: int = 20, seed: int = 0) -> Training:
    return Training(
        num_steps=num_steps,
        batch_size=256,
        learning_rate=0.005,
        weight_decay=0.0,
        ema_decay=0.98,
        seed=seed,
    )


def taught(
    folder: Path,
    ensemble: Ensemble,
    lessons: DistillationData,
    teacher: Teacher,
    num_steps: int = 20,
    source: str = "test",
    should_stop: Callable[[], bool] = lambda: False,
    engine: Engine = Engine(device="cpu"),
) -> FinishedTraining:
    return distill(
        ensemble,
        small(),
        lessons,
        settings(num_steps),
        TrainingRun(folder, should_stop=should_stop, engine=engine),
        teacher=teacher,
        source=source,
    )


def relative_error(student: FinishedTraining) -> float:
    """``sqrt(E |v - u|^2 / E |u|^2)`` over t uniform and x drawn from p_t."""
    network = small()
    network.load_state_dict(student.ema)
    random = torch.Generator().manual_seed(7)
    t_B = torch.rand(4000, generator=random)
    x_BD = (1 - t_B)[:, None] * MIXTURE.draw(4000, 8).float() + t_B[:, None] * torch.randn(
        4000, 2, generator=random
    )
    exact_BD = MIXTURE.velocity(x_BD.double(), t_B.double())
    with torch.inference_mode():
        found_BD = network(x_BD, t_B)
    return float(((found_BD - exact_BD).square().sum() / exact_BD.square().sum()).sqrt())


def same_bytes(one: FinishedTraining, other: FinishedTraining) -> bool:
    return all(
        one.ema[name].numpy().tobytes() == value.numpy().tobytes()
        for name, value in other.ema.items()
    )


def batch_of(lessons: DistillationData, seed: int = 5) -> Batch:
    """Every image once, at a time and with a noise of its own."""
    random = torch.Generator().manual_seed(seed)
    num = len(lessons.images)
    eps = torch.randn(num, 2, generator=random)
    t_B = torch.rand(num, generator=random)
    uniform_B = torch.rand(num, generator=random, dtype=torch.float64)
    return Batch(lessons.images, eps, t_B, lessons.labels, None, torch.arange(num), uniform_B)


def answers(
    ensemble: Ensemble, lessons: DistillationData, teacher: Teacher, batch: Batch
) -> Tensor:
    """What the teacher says at the batch's x_t, as the student is shown it."""
    shown = teaching(ensemble, lessons, teacher, source="test")(batch)
    return velocity(LinearPath(), shown.x_0, shown.eps, shown.t_B)


def test_a_teachers_answer_is_shown_at_the_same_x_t_and_as_its_velocity() -> None:
    lessons = data(500)
    batch = batch_of(lessons)
    shown = teaching(ensemble_of(), lessons, "mixture", source="test")(batch)
    x_B = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    assert torch.allclose(x_t(LinearPath(), shown.x_0, shown.eps, shown.t_B), x_B, atol=1e-5)
    assert torch.allclose(
        velocity(LinearPath(), shown.x_0, shown.eps, shown.t_B),
        MIXTURE.velocity(x_B, batch.t_B),
        atol=1e-4,
    )
    assert not torch.allclose(shown.x_0, batch.x_0, atol=0.1)


@pytest.mark.parametrize(
    "learned", LEARNED, ids=lambda learned: f"{learned.path}-{learned.prediction}"
)
@pytest.mark.parametrize("canonical", ["linear", "cosine_vp"])
def test_label_teachers_answer_is_its_experts_velocity_whatever_the_expert_learned(
    canonical: PathName, learned: ExpertObjective
) -> None:
    path = path_named(canonical)
    mixture = four_silos(path_named(canonical))
    experts = [on_path(exact_expert(k, learned), learned, path) for k in range(4)]
    x_ND = MIXTURE.draw(600, 0)
    lessons = DistillationData(x_ND, MIXTURE.silo_of(x_ND))
    batch = batch_of(lessons)
    batch = replace(batch, eps=batch.eps.double(), t_B=(0.05 + 0.9 * batch.t_B).double())
    x_BD = x_t(path, batch.x_0, batch.eps, batch.t_B)
    assert lessons.expert_N is not None
    exact_BD = torch.empty_like(x_BD)
    for k in range(4):
        rows = lessons.expert_N == k
        exact_BD[rows] = mixture.expert(k)(x_BD[rows], batch.t_B[rows])

    def found(of: list[Velocity]) -> Tensor:
        ensemble = Ensemble(of, None, MIXTURE.prior_K, shape=(2,), path=path)
        shown = teaching(ensemble, lessons, "label", source="test")(batch)
        assert torch.allclose(x_t(path, shown.x_0, shown.eps, shown.t_B), x_BD)
        return velocity(path, shown.x_0, shown.eps, shown.t_B)

    torch.testing.assert_close(found(experts), exact_BD, atol=1e-10, rtol=1e-8)
    assert not torch.allclose(found([*experts[1:], experts[0]]), exact_BD, atol=0.1), (
        "each its own expert"
    )
    if (learned.path, learned.prediction) != (canonical, "velocity"):
        assert not torch.allclose(
            found([exact_expert(k, learned) for k in range(4)]), exact_BD, atol=0.1
        )


def standard_scores(difference_BD: Tensor, x_BD: Tensor, t_B: Tensor) -> Tensor:
    """How many standard errors the mean of a difference is from 0, weighted by functions of x_t and t, one each."""
    waves = [
        torch.ones_like(t_B),
        x_BD[:, 0],
        x_BD[:, 1],
        t_B,
        (2 * x_BD[:, 0]).sin(),
        (2 * x_BD[:, 1]).sin(),
    ]
    product_FBD = torch.stack(waves)[..., None] * difference_BD
    return product_FBD.mean(1) / (product_FBD.std(1) / len(t_B) ** 0.5)


@pytest.mark.parametrize("teacher", ["label", "drawn"])
def test_one_experts_answer_is_an_unbiased_estimate_of_the_mixture(teacher: Teacher) -> None:
    lessons = data(20_000)
    batch = batch_of(lessons)
    x_B = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    mixture_BD = MIXTURE.velocity(x_B, batch.t_B)
    found_BD = answers(ensemble_of(), lessons, teacher, batch)
    # of each x_t it is an estimate, not the mixture
    assert not torch.allclose(found_BD, mixture_BD, atol=0.1)
    assert float(standard_scores(found_BD - mixture_BD, x_B, batch.t_B).abs().max()) < 4.5
    # The control: labels dealt to other images, and experts drawn by a router that knows nothing.
    assert lessons.expert_N is not None
    dealt = replace(lessons, expert_N=lessons.expert_N.roll(1))
    wrong_BD = answers(blind() if teacher == "drawn" else ensemble_of(), dealt, teacher, batch)
    assert float(standard_scores(wrong_BD - mixture_BD, x_B, batch.t_B).abs().max()) > 20


def test_an_experts_answer_varies_less_around_the_mixture_than_the_images_own_velocity() -> None:
    lessons = data(4000)
    batch = batch_of(lessons)
    mixture_BD = MIXTURE.velocity(x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B), batch.t_B)
    own_BD = velocity(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    of_expert, of_image = (
        (found_BD - mixture_BD).square().mean()
        for found_BD in (answers(ensemble_of(), lessons, "label", batch), own_BD)
    )
    assert float(of_expert) < 0.9 * float(of_image)


def test_drawn_teachers_at_public_images_of_another_law_still_mean_the_mixture_and_labels_do_not() -> (
    None
):
    x_ND = MIXTURE.draw(40_000, 0)
    silo_N = MIXTURE.silo_of(x_ND)
    chosen = torch.cat([(silo_N == 0).nonzero()[:2000, 0], (silo_N == 2).nonzero()[:2000, 0]])
    lessons = DistillationData(x_ND[chosen].float(), silo_N[chosen])
    batch = batch_of(lessons)
    x_B = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    mixture_BD = MIXTURE.velocity(x_B, batch.t_B)
    drawn, label = (
        float(
            standard_scores(
                answers(ensemble_of(), lessons, teacher, batch) - mixture_BD, x_B, batch.t_B
            )
            .abs()
            .max()
        )
        for teacher in ("drawn", "label")
    )
    assert drawn < 4.5
    assert label > 10


def test_student_of_the_ensembles_own_samples_learns_the_mixture_and_one_of_a_uniform_mixture_does_not(
    tmp_path: Path,
) -> None:
    lessons = own_samples(
        ensemble_of(),
        1024,
        tmp_path / "samples",
        SampleRecipe(source="exact", steps=20),
        on_progress=lambda num_done, total: None,
    )
    right = taught(tmp_path / "right", ensemble_of(), lessons, "label", num_steps=400)
    wrong = taught(tmp_path / "wrong", blind(), lessons, "mixture", num_steps=400)
    assert relative_error(right) < BOUND < relative_error(wrong)


@pytest.mark.parametrize("teacher", ["label", "drawn", "mixture"])
def test_distillation_that_was_stopped_goes_on_to_the_same_bytes(
    tmp_path: Path, teacher: Teacher
) -> None:
    whole = taught(tmp_path / "whole", ensemble_of(), data(200), teacher)
    questions = iter(range(13))
    with pytest.raises(KeyboardInterrupt):
        taught(
            tmp_path / "two",
            ensemble_of(),
            data(200),
            teacher,
            should_stop=lambda: next(questions, None) is None,
        )
    assert same_bytes(whole, taught(tmp_path / "two", ensemble_of(), data(200), teacher))
    assert not same_bytes(
        whole, taught(tmp_path / "other", ensemble_of(), data(200, seed=1), teacher)
    )


def test_parts_of_a_batch_are_taught_what_they_are_taught_together(tmp_path: Path) -> None:
    whole = taught(tmp_path / "whole", ensemble_of(), data(200), "drawn", num_steps=5)
    parts = taught(
        tmp_path / "parts",
        ensemble_of(),
        data(200),
        "drawn",
        num_steps=5,
        engine=Engine(device="cpu", accumulate=3),
    )
    for name, value in whole.ema.items():
        torch.testing.assert_close(parts.ema[name], value, atol=1e-4, rtol=1e-3)
    assert not same_bytes(whole, parts), "they were taken apart"


def test_distillation_of_another_ensemble_or_other_labels_does_not_continue_from_these_checkpoints(
    tmp_path: Path,
) -> None:
    lessons = data(200)
    taught(tmp_path, ensemble_of(), lessons, "label")
    taught(tmp_path, ensemble_of(), lessons, "label")
    others = [
        ("other", lessons, "label"),
        ("test", lessons, "drawn"),
        ("test", DistillationData(lessons.images, lessons.expert_N.roll(1)), "label"),
    ]
    for source, shown, teacher in others:
        with pytest.raises(
            SetupError, check=has_subject("checkpoints in test_distillation_of_another_e0")
        ):
            taught(tmp_path, ensemble_of(), shown, teacher, source=source)  # type: ignore[arg-type]


def test_teachers_that_cannot_answer_are_refused(tmp_path: Path) -> None:
    lessons = data(20)
    with pytest.raises(MathError, check=has_subject("teacher label")):
        taught(tmp_path, ensemble_of(), DistillationData(lessons.images), "label")
    for teacher in ("drawn", "mixture"):
        with pytest.raises(MathError, check=has_subject("teacher's posterior")):
            taught(tmp_path, replace(ensemble_of(), router=None), lessons, teacher)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, check=has_subject("labels")):
        taught(
            tmp_path, ensemble_of(), DistillationData(lessons.images, lessons.expert_N + 4), "label"
        )
    with pytest.raises(ShapeError, check=has_subject("images")):
        taught(tmp_path, ensemble_of(), DistillationData(torch.zeros(4, 3)), "drawn")
    with pytest.raises(DataError):
        DistillationData(torch.zeros(0, 2))
    assert not list(tmp_path.iterdir())


def refuse(x_B: Tensor, t_B: Tensor) -> Tensor:
    raise AssertionError("no expert is asked")


def drawn_from(
    ensemble: Ensemble, folder: Path, num: int = 300, source: str = "one", seed: int = 0
) -> DistillationData:
    return own_samples(
        ensemble,
        num,
        folder,
        SampleRecipe(source=source, steps=4, seed=seed),
        on_progress=lambda num_done, total: None,
    )


def test_own_samples_are_kept_and_drawn_once_and_belong_to_the_expert_that_made_them(
    tmp_path: Path,
) -> None:
    first = drawn_from(ensemble_of(), tmp_path)
    idle = replace(ensemble_of(), experts=[refuse] * 4)
    again = drawn_from(idle, tmp_path)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.expert_N, again.expert_N)
    assert first.expert_N is not None
    assert (
        float(torch.eq(MIXTURE.silo_of(first.images.double()), first.expert_N).double().mean())
        > 0.95
    )
    assert torch.equal(drawn_from(ensemble_of(), tmp_path, num=100).images, first.images[:100])
    for others in ({"source": "two"}, {"seed": 1}):
        with pytest.raises(AssertionError, match="no expert"):
            drawn_from(idle, tmp_path, **others)  # type: ignore[arg-type]


def test_own_samples_that_are_damaged_on_disk_are_drawn_again(tmp_path: Path) -> None:
    first = drawn_from(ensemble_of(), tmp_path)
    part = min(tmp_path.iterdir())
    part.write_bytes(part.read_bytes()[:100])
    assert torch.equal(first.images, drawn_from(ensemble_of(), tmp_path).images)


def test_own_samples_tell_of_every_step_and_those_that_are_not_finite_are_not_kept(
    tmp_path: Path,
) -> None:
    reports: list[tuple[int, int]] = []
    own_samples(
        ensemble_of(),
        300,
        tmp_path,
        SampleRecipe(source="a", steps=3),
        on_progress=lambda *pair: reports.append(pair),
    )
    assert [num_done for num_done, _ in reports] == [256, 512, 768, 768, 812, 856, 900, 900]
    assert {total for _, total in reports} == {900}
    wild = replace(ensemble_of(), experts=[lambda x_B, t_B: x_B / 0] * 4)
    with pytest.raises(NumericalError, check=has_subject("the ensemble's own samples")):
        own_samples(
            wild,
            5,
            tmp_path / "wild",
            SampleRecipe(source="a", steps=3),
            on_progress=lambda steps, total: None,
        )
    assert not (tmp_path / "wild").exists()


def test_own_samples_of_large_shapes_are_drawn_and_kept_few_at_a_time_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = drawn_from(ensemble_of(), tmp_path / "one", num=40)
    monkeypatch.setattr("ddm.distillation.dataset._PART_BYTES", 8 * 16)  # of 16 points in the plane
    again = drawn_from(ensemble_of(), tmp_path / "few", num=40)
    assert (len(list((tmp_path / "one").iterdir())), len(list((tmp_path / "few").iterdir()))) == (
        1,
        3,
    )
    torch.testing.assert_close(again.images, first.images)
    assert torch.equal(again.expert_N, first.expert_N)


class Pixels:
    """An encoder whose features are the values themselves."""

    dim = 2

    def encode(self, images: Tensor, on_progress: object = None) -> Tensor:
        return images.flatten(1)


def published_experts(*clusters: int | None) -> list[PublishedExpert]:
    file = File(path="x", bytes=1, digest="0" * 64)
    return [
        PublishedExpert(
            expert_id=f"s{k}", silo_id=f"s{k}", cluster=cluster, prior=(k + 1) / 6, file=file
        )
        for k, cluster in enumerate(clusters)
    ]


def test_public_images_belong_to_experts_of_their_cluster_by_their_priors_or_to_nobody() -> None:
    centres_FD = torch.tensor([[0.0, 5.0], [5.0, 0.0], [-5.0, 0.0]])
    clusters = Clusters(
        centres_FD, coarse_F=torch.tensor([0, 1, 2]), group_F=torch.tensor([0, 1, 2])
    )
    files = PlanFiles(encoder=Pixels(), clusters=clusters, sketch=None)  # type: ignore[arg-type]
    images = centres_FD.repeat_interleave(3000, 0)
    known_N, expert_N = by_cluster(images, files, published_experts(0, 1, 1), seed=0)
    # nobody's expert is made of the third cluster
    assert torch.equal(known_N.nonzero()[:, 0], torch.arange(6000))
    assert bool((expert_N[:3000] == 0).all())
    share = float((expert_N[3000:] == 2).double().mean())
    assert share == pytest.approx(3 / 5, abs=0.05)
    with pytest.raises(SetupError, check=has_subject("teacher label")):
        by_cluster(images, files, published_experts(0, None, 1), seed=0)
    with pytest.raises(DataError):
        by_cluster(images[6000:], files, published_experts(0, 1, 1), seed=0)
