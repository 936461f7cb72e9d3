"""A student of closed-form experts: whom it is taught by, what it learns, what it keeps, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddm.cli import app
from ddm.clustering import Clusters
from ddm.console import run_app
from ddm.distillation import Teacher, distill, teaching
from ddm.ensemble import Ensemble
from ddm.errors import DataError, DigestError, MathError, SetupError, ShapeError
from ddm.lessons import Lessons, by_cluster, own_samples
from ddm.plan_files import PlanFiles
from ddm.protocol.base import File, sha256_hex
from ddm.protocol.manifest import PublishedExpert
from ddm.protocol.plan import Training
from ddm.schedule import LinearPath, velocity, x_t
from ddm.student import Student, load_student
from ddm.training import Batch, Engine, Trained
from tests.conftest import Published
from tests.ddm.gaussian_mixture import GaussianMixture, UninformedRouter, four_silos

# Shape legend: B batch, K experts, N images, D dimensions, F test functions.

MIXTURE = four_silos()
BOUND = 0.25  # relative error that a student of a few seconds stays below


def ensemble_of(mixture: GaussianMixture = MIXTURE) -> Ensemble:
    """The exact experts and the exact router."""
    return Ensemble(mixture.experts(), mixture, mixture.prior_K, shape=(2,))


def blind() -> Ensemble:
    """The same experts under a router that knows nothing and equal priors: the wrong target."""
    return replace(ensemble_of(), router=UninformedRouter(4), prior=[1.0] * 4)


def data(num: int, seed: int = 0) -> Lessons:
    """The mixture's own data, each point with the silo that it was drawn from."""
    x_ND = MIXTURE.draw(num, seed)
    return Lessons(x_ND.float(), MIXTURE.silo_of(x_ND))


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
        checkpoint_steps=5 if num_steps < 100 else num_steps,
        seed=seed,
    )


def taught(
    folder: Path,
    ensemble: Ensemble,
    lessons: Lessons,
    teacher: Teacher,
    num_steps: int = 20,
    source: str = "test",
    should_stop: Callable[[], bool] = lambda: False,
    engine: Engine = Engine(device="cpu"),
) -> Trained:
    return distill(
        ensemble,
        small(),
        lessons,
        settings(num_steps),
        teacher=teacher,
        source=source,
        checkpoint_dir=folder,
        on_progress=lambda progress: None,
        should_stop=should_stop,
        engine=engine,
    )


def relative_error(student: Trained) -> float:
    """``sqrt(E |v - u|^2 / E |u|^2)`` over t uniform and x drawn from p_t."""
    network = small()
    network.load_state_dict(student.ema)
    random = torch.Generator().manual_seed(7)
    t_B = torch.rand(4000, generator=random)
    x_BD = (1 - t_B)[:, None] * MIXTURE.draw(4000, 8).float() + t_B[:, None] * torch.randn(4000, 2, generator=random)
    exact_BD = MIXTURE.velocity(x_BD.double(), t_B.double())
    with torch.inference_mode():
        found_BD = network(x_BD, t_B)
    return float(((found_BD - exact_BD).square().sum() / exact_BD.square().sum()).sqrt())


def same_bytes(one: Trained, other: Trained) -> bool:
    return all(one.ema[name].numpy().tobytes() == value.numpy().tobytes() for name, value in other.ema.items())


def batch_of(lessons: Lessons, seed: int = 5) -> Batch:
    """Every image once, at a time and with a noise of its own."""
    random = torch.Generator().manual_seed(seed)
    num = len(lessons.images)
    eps = torch.randn(num, 2, generator=random)
    t_B, uniform_B = torch.rand(num, generator=random), torch.rand(num, generator=random, dtype=torch.float64)
    return Batch(lessons.images, eps, t_B, lessons.told, None, torch.arange(num), uniform_B)


def answers(ensemble: Ensemble, lessons: Lessons, teacher: Teacher, batch: Batch) -> Tensor:
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
        velocity(LinearPath(), shown.x_0, shown.eps, shown.t_B), MIXTURE.velocity(x_B, batch.t_B), atol=1e-4
    )
    assert not torch.allclose(shown.x_0, batch.x_0, atol=0.1)


def standard_scores(difference_BD: Tensor, x_BD: Tensor, t_B: Tensor) -> Tensor:
    """How many standard errors the mean of a difference is from 0, weighted by functions of x_t and t, one each."""
    waves = [torch.ones_like(t_B), x_BD[:, 0], x_BD[:, 1], t_B, (2 * x_BD[:, 0]).sin(), (2 * x_BD[:, 1]).sin()]
    product_FBD = torch.stack(waves)[..., None] * difference_BD
    return product_FBD.mean(1) / (product_FBD.std(1) / len(t_B) ** 0.5)


@pytest.mark.parametrize("teacher", ["label", "drawn"])
def test_one_experts_answer_is_an_unbiased_estimate_of_the_mixture(teacher: Teacher) -> None:
    lessons = data(20_000)
    batch = batch_of(lessons)
    x_B = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    mixture_BD = MIXTURE.velocity(x_B, batch.t_B)
    found_BD = answers(ensemble_of(), lessons, teacher, batch)
    assert not torch.allclose(found_BD, mixture_BD, atol=0.1)  # of each x_t it is an estimate, not the mixture
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


def test_drawn_teachers_at_public_images_of_another_law_still_mean_the_mixture_and_labels_do_not() -> None:
    x_ND = MIXTURE.draw(40_000, 0)
    silo_N = MIXTURE.silo_of(x_ND)
    chosen = torch.cat([(silo_N == 0).nonzero()[:2000, 0], (silo_N == 2).nonzero()[:2000, 0]])
    lessons = Lessons(x_ND[chosen].float(), silo_N[chosen])
    batch = batch_of(lessons)
    x_B = x_t(LinearPath(), batch.x_0, batch.eps, batch.t_B)
    mixture_BD = MIXTURE.velocity(x_B, batch.t_B)
    drawn, label = (
        float(standard_scores(answers(ensemble_of(), lessons, teacher, batch) - mixture_BD, x_B, batch.t_B).abs().max())
        for teacher in ("drawn", "label")
    )
    assert drawn < 4.5
    assert label > 10


def test_student_of_the_ensembles_own_samples_learns_the_mixture_and_one_of_a_uniform_mixture_does_not(
    tmp_path: Path,
) -> None:
    lessons = own_samples(
        ensemble_of(), 1024, tmp_path / "samples", source="exact", steps=20, on_progress=lambda done, total: None
    )
    right = taught(tmp_path / "right", ensemble_of(), lessons, "label", num_steps=400)
    wrong = taught(tmp_path / "wrong", blind(), lessons, "mixture", num_steps=400)
    assert relative_error(right) < BOUND < relative_error(wrong)


@pytest.mark.parametrize("teacher", ["label", "drawn", "mixture"])
def test_distillation_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path, teacher: Teacher) -> None:
    whole = taught(tmp_path / "whole", ensemble_of(), data(200), teacher)
    asked = iter(range(13))
    with pytest.raises(KeyboardInterrupt):
        taught(tmp_path / "two", ensemble_of(), data(200), teacher, should_stop=lambda: next(asked, None) is None)
    assert same_bytes(whole, taught(tmp_path / "two", ensemble_of(), data(200), teacher))
    assert not same_bytes(whole, taught(tmp_path / "other", ensemble_of(), data(200, seed=1), teacher))


def test_parts_of_a_batch_are_taught_what_they_are_taught_together(tmp_path: Path) -> None:
    whole = taught(tmp_path / "whole", ensemble_of(), data(200), "drawn", num_steps=5)
    parts = taught(
        tmp_path / "parts", ensemble_of(), data(200), "drawn", num_steps=5, engine=Engine(device="cpu", accumulate=3)
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
        ("test", Lessons(lessons.images, lessons.expert_N.roll(1)), "label"),
    ]
    for source, shown, teacher in others:
        with pytest.raises(SetupError, match="checkpoints"):
            taught(tmp_path, ensemble_of(), shown, teacher, source=source)  # type: ignore[arg-type]


def test_teachers_that_cannot_answer_are_refused(tmp_path: Path) -> None:
    lessons = data(20)
    with pytest.raises(MathError, match="label"):
        taught(tmp_path, ensemble_of(), Lessons(lessons.images), "label")
    for teacher in ("drawn", "mixture"):
        with pytest.raises(MathError, match="router"):
            taught(tmp_path, replace(ensemble_of(), router=None), lessons, teacher)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="labels"):
        taught(tmp_path, ensemble_of(), Lessons(lessons.images, lessons.expert_N + 4), "label")
    with pytest.raises(ShapeError, match="images"):
        taught(tmp_path, ensemble_of(), Lessons(torch.zeros(4, 3)), "drawn")
    with pytest.raises(DataError):
        Lessons(torch.zeros(0, 2))
    assert not list(tmp_path.iterdir())


def refuse(x_B: Tensor, t_B: Tensor) -> Tensor:
    raise AssertionError("no expert is asked")


def drawn_from(ensemble: Ensemble, folder: Path, num: int = 300, source: str = "one", seed: int = 0) -> Lessons:
    return own_samples(ensemble, num, folder, source=source, steps=4, seed=seed, on_progress=lambda done, total: None)


def test_own_samples_are_kept_and_drawn_once_and_belong_to_the_expert_that_made_them(tmp_path: Path) -> None:
    first = drawn_from(ensemble_of(), tmp_path)
    idle = replace(ensemble_of(), experts=[refuse] * 4)
    again = drawn_from(idle, tmp_path)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.expert_N, again.expert_N)
    assert float((MIXTURE.silo_of(first.images.double()) == first.expert_N).double().mean()) > 0.95
    assert torch.equal(drawn_from(ensemble_of(), tmp_path, num=100).images, first.images[:100])
    for others in ({"source": "two"}, {"seed": 1}):
        with pytest.raises(AssertionError, match="no expert"):
            drawn_from(idle, tmp_path, **others)  # type: ignore[arg-type]


def test_own_samples_that_are_damaged_on_disk_are_drawn_again(tmp_path: Path) -> None:
    first = drawn_from(ensemble_of(), tmp_path)
    part = min(tmp_path.iterdir())
    part.write_bytes(part.read_bytes()[:100])
    assert torch.equal(first.images, drawn_from(ensemble_of(), tmp_path).images)


class Pixels:
    """An encoder whose features are the values themselves."""

    dim = 2

    def encode(self, images: Tensor, on_progress: object = None) -> Tensor:
        return images.flatten(1)


def published_experts(*clusters: int | None) -> list[PublishedExpert]:
    file = File(path="x", bytes=1, digest="0" * 64)
    return [
        PublishedExpert(expert_id=f"s{k}", silo_id=f"s{k}", cluster=cluster, prior=(k + 1) / 6, file=file)
        for k, cluster in enumerate(clusters)
    ]


def test_public_images_belong_to_experts_of_their_cluster_by_their_priors_or_to_nobody() -> None:
    centres_FD = torch.tensor([[0.0, 5.0], [5.0, 0.0], [-5.0, 0.0]])
    clusters = Clusters(centres_FD, coarse_F=torch.tensor([0, 1, 2]), group_F=torch.tensor([0, 1, 2]))
    files = PlanFiles(encoder=Pixels(), clusters=clusters, sketch=None)  # type: ignore[arg-type]
    images = centres_FD.repeat_interleave(3000, 0)
    known_N, expert_N = by_cluster(images, files, published_experts(0, 1, 1), seed=0)
    assert torch.equal(known_N.nonzero()[:, 0], torch.arange(6000))  # nobody's expert is made of the third cluster
    assert bool((expert_N[:3000] == 0).all())
    share = float((expert_N[3000:] == 2).double().mean())
    assert share == pytest.approx(3 / 5, abs=0.05)
    with pytest.raises(SetupError, match="cluster"):
        by_cluster(images, files, published_experts(0, None, 1), seed=0)
    with pytest.raises(DataError):
        by_cluster(images[6000:], files, published_experts(0, 1, 1), seed=0)


def command(*words: object) -> int:
    """Run `ddm` with these words; return its exit code."""
    with pytest.raises(SystemExit) as done:
        run_app(app, [str(word) for word in words])
    return int(done.value.code or 0)


def distilled(published: Published, out: Path, *more: object) -> int:
    return command(
        "distill", published.release, "--root", published.root, "--state", out.parent / "state", "--out", out, *more
    )


def test_command_leaves_a_student_that_names_its_release_and_can_be_sampled_from(
    published: Published, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distilled(published, out, "--num", 20, "--steps", 4) == 0
    record, student = load_student(out)
    manifest = next(published.release.glob("targets/*/manifest.json")).read_bytes()
    assert record.source.manifest == sha256_hex(manifest)
    assert record.source.root == sha256_hex(published.root.read_bytes())
    assert (record.images.num, record.teacher, record.training.num_steps) == (20, "label", 4)
    assert student.sample(3, steps=2).images.shape == (3, 1, 4, 4)
    before = out.read_bytes()
    assert distilled(published, out, "--num", 20, "--steps", 4) == 0
    assert out.read_bytes() == before
    weights = bytearray(before)
    weights[-1] ^= 1
    out.write_bytes(weights)
    with pytest.raises(DigestError):
        load_student(out)


def test_command_distils_at_given_images_into_another_architecture(published: Published, tmp_path: Path) -> None:
    out, images = tmp_path / "student.safetensors", tmp_path / "public.npz"
    np.savez(images, images=np.random.default_rng(0).uniform(-1, 1, (30, 1, 4, 4)).astype(np.float32))
    toml = tmp_path / "wide.toml"
    toml.write_text('[architecture]\nkind = "dit"\npatch = 2\nhidden = 24\ndepth = 2\nheads = 2\n')
    assert distilled(published, out, "--data", images, "--architecture", toml, "--steps", 3) == 0
    record = Student.parse(out.with_suffix(".json").read_bytes(), subject="record")
    assert record.images.model_dump() == {"kind": "given_images", "num": 30, "digest": sha256_hex(images.read_bytes())}
    assert (record.teacher, record.architecture.hidden) == ("drawn", 24)  # type: ignore[union-attr]
    assert load_student(out)[1].sample(1, steps=2).images.shape == (1, 1, 4, 4)


def test_command_refuses_a_release_that_was_tampered_with_and_flags_that_do_not_go_together(
    published: Published, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    assert distilled(published, out, "--num", 5, "--data", "public.npz") == SetupError.exit_code
    assert distilled(published, tmp_path / "student", "--num", 5) == SetupError.exit_code
    expert = next(published.release.glob("targets/*/silos/*/experts/*/expert.safetensors"))
    data = bytearray(expert.read_bytes())
    data[-1] ^= 1
    expert.write_bytes(data)
    assert distilled(published, out, "--num", 20, "--steps", 4) == DigestError.exit_code
    assert not out.with_suffix(".json").exists()
