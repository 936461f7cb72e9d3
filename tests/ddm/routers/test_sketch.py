import math
from dataclasses import replace

import pytest
import torch

from ddm.diffusion.path import CosinePath, LinearPath, x_t
from ddm.errors import DataError, NumericalError, PolicyError, ShapeError
from ddm.io.tensors import load_tensors, save_tensors
from ddm.protocol.data import DataSpec
from ddm.routers.sketch import Sketch, sketch_specs
from tests.support.case import case
from tests.support.errors import has_subject

RANK = 4
GROUPS = 3


def _public(num: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in three groups with different means and spreads."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(num) % GROUPS
    centre = 2 * torch.randn(GROUPS, 25, generator=generator)
    spread = torch.linspace(1.5, 0.2, 25)
    return (3 + centre[group] + spread * torch.randn(num, 25, generator=generator)).view(
        num, 1, 5, 5
    ), group


@pytest.fixture(scope="module")
def sketch() -> Sketch:
    return Sketch.fit(*_public(), RANK, GROUPS)


@pytest.mark.parametrize("path", [LinearPath(), CosinePath()])
def test_sketch_commutes_with_noising(sketch: Sketch, path) -> None:
    generator = torch.Generator().manual_seed(1)
    x_0 = _public()[0][:50].double()
    eps = torch.randn(x_0.shape, generator=generator, dtype=torch.float64)
    t = torch.rand(50, generator=generator, dtype=torch.float64)
    actual = sketch.of(x_t(path, x_0, eps, t), t, path)
    s_0 = sketch.of(x_0, torch.zeros(50), path)
    n = eps.flatten(1) @ sketch.basis_RD.double().T
    expected = path.alpha(t)[:, None] * s_0 + path.sigma(t)[:, None] / sketch.scale * n
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    uncentred = x_t(path, x_0, eps, t).flatten(1) @ sketch.basis_RD.double().T / sketch.scale
    # the mean must be scaled by alpha, not left out
    assert float((uncentred - expected).abs().max()) > 0.1


def test_sketch_noise_is_standard_because_its_rows_are_orthonormal(sketch: Sketch) -> None:
    gram = sketch.basis_RD.double() @ sketch.basis_RD.double().T
    torch.testing.assert_close(gram, torch.eye(RANK, dtype=torch.float64), atol=1e-6, rtol=0)


def test_projection_is_clipped_to_the_unit_ball_and_a_noised_sample_never(sketch: Sketch) -> None:
    far = 100 * _public()[0][:20]
    assert float(sketch.project(far).norm(dim=1).max()) <= 1.0
    assert float(sketch.of(far, torch.zeros(20), LinearPath()).norm(dim=1).max()) > 10
    direction = sketch.of(far, torch.zeros(20), LinearPath()).double()
    cosine = torch.nn.functional.cosine_similarity(sketch.project(far), direction)
    torch.testing.assert_close(cosine, torch.ones(20, dtype=torch.float64), atol=1e-5, rtol=0)


def test_scale_leaves_under_one_percent_of_public_images_outside(sketch: Sketch) -> None:
    norm = sketch.of(_public()[0], torch.zeros(600), LinearPath()).norm(dim=1)
    assert 0 < float((norm > 1 + 1e-6).float().mean()) < 0.01


def test_renoised_sketches_follow_the_law_of_the_later_level(sketch: Sketch) -> None:
    path = LinearPath()
    t_r = 0.4
    t = 0.7
    num = 200_000
    generator = torch.Generator().manual_seed(2)
    s_0 = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)
    noise = torch.randn(num, RANK, generator=generator, dtype=torch.float64)
    s_r = (1 - t_r) * s_0 + t_r / sketch.scale * noise
    renoised = sketch.renoise(s_r, t_r, torch.full((num,), t), path, generator)
    std = t / sketch.scale
    error = std / math.sqrt(num)
    assert float((renoised.mean(0) - (1 - t) * s_0).abs().max()) < 5 * error
    assert float((renoised.std(0) / std - 1).abs().max()) < 5 / math.sqrt(2 * num)
    # the same noise added without shrinking the sketch first
    direct = s_r + (renoised - (1 - t) / (1 - t_r) * s_r)
    assert float((direct.std(0) / std - 1).abs().max()) > 20 / math.sqrt(2 * num)


def test_renoising_to_its_own_level_changes_nothing(sketch: Sketch) -> None:
    s_r = torch.randn(10, RANK, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    renoised = sketch.renoise(s_r, 0.4, torch.full((10,), 0.4), LinearPath(), torch.Generator())
    torch.testing.assert_close(renoised, s_r, atol=1e-3, rtol=0)


def test_renoising_backwards_is_refused(sketch: Sketch) -> None:
    with pytest.raises(NumericalError, check=has_subject("re-noising")):
        sketch.renoise(
            torch.zeros(2, RANK), 0.6, torch.tensor([0.7, 0.5]), LinearPath(), torch.Generator()
        )


def test_group_statistics_are_those_of_the_groups_when_they_are_large(sketch: Sketch) -> None:
    images, group = _public()
    s_0 = sketch.of(images, torch.zeros(len(images)), LinearPath()).double()
    for g in range(GROUPS):
        torch.testing.assert_close(
            sketch.group_mean_GR[g].double(), s_0[group == g].mean(0), atol=1e-6, rtol=0
        )
        torch.testing.assert_close(
            sketch.group_cov_GRR[g].double(), s_0[group == g].T.cov(), atol=2e-3, rtol=0.15
        )
    assert float((sketch.group_mean_GR[0] - sketch.group_mean_GR[1]).abs().max()) > 0.1


def test_group_covariance_is_positive_definite_when_a_group_has_one_image() -> None:
    images, group = _public(200)
    group = group.clone()
    group[group == 2] = 1
    group[0] = 2
    Sketch.fit(images, group, RANK, GROUPS).check()


def test_sketch_refuses_a_group_without_public_images() -> None:
    images, group = _public()
    with pytest.raises(DataError, check=has_subject("public images")):
        Sketch.fit(images, group, RANK, 4)


def test_sketch_refuses_images_of_another_size(sketch: Sketch) -> None:
    with pytest.raises(ShapeError):
        sketch.project(torch.zeros(2, 1, 4, 4))


def test_malicious_plan_with_a_basis_that_is_not_orthonormal_is_refused(sketch: Sketch) -> None:
    sketch.check()
    with pytest.raises(PolicyError, check=has_subject("the plan's sketch basis")):
        replace(sketch, basis_RD=sketch.basis_RD * 1.01).check()
    with pytest.raises(PolicyError, check=has_subject("the plan's sketch basis")):
        replace(sketch, basis_RD=sketch.basis_RD[[0, 1, 2, 2]]).check()


def test_malicious_plan_with_an_absurd_scale_is_refused(sketch: Sketch) -> None:
    for scale in [0.0, -1.0, 1e-9, 1e9, math.inf, math.nan]:
        with (
            case(scale=scale),
            pytest.raises(PolicyError, check=has_subject("the plan's sketch scale")),
        ):
            replace(sketch, scale=scale).check()


def test_malicious_plan_with_false_group_statistics_is_refused(sketch: Sketch) -> None:
    with pytest.raises(PolicyError, check=has_subject("the plan's group covariances")):
        replace(sketch, group_cov_GRR=-sketch.group_cov_GRR).check()
    with pytest.raises(PolicyError, check=has_subject("the plan's group shares")):
        replace(sketch, group_weight_G=2 * sketch.group_weight_G).check()
    with pytest.raises(PolicyError, check=has_subject("the plan's sketch")):
        replace(sketch, mean_D=sketch.mean_D * math.nan).check()


def test_sketch_survives_its_file(sketch: Sketch, tmp_path) -> None:
    save_tensors(tmp_path / "sketch.safetensors", sketch.tensors())
    specs = sketch_specs(DataSpec(shape=(1, 5, 5), range=(-1.0, 1.0)), RANK, GROUPS)
    loaded = Sketch.from_tensors(
        load_tensors(tmp_path / "sketch.safetensors", specs, max_bytes=10_000)
    )
    assert loaded.scale == sketch.scale
    assert torch.equal(loaded.project(_public()[0]), sketch.project(_public()[0]))


def test_head_of_a_sketch_is_the_sketch_of_its_leading_dimensions(sketch: Sketch) -> None:
    images, group = _public()
    narrow = Sketch.fit(images, group, RANK, GROUPS, released_rank=2).head(2)
    alone = Sketch.fit(images, group, 2, GROUPS)
    assert narrow.scale == pytest.approx(alone.scale)
    torch.testing.assert_close(narrow.project(images), alone.project(images), atol=1e-6, rtol=0)
    torch.testing.assert_close(narrow.group_mean_GR, alone.group_mean_GR, atol=1e-6, rtol=0)
    # C is about what is released
    assert Sketch.fit(images, group, RANK, GROUPS).scale > alone.scale
    narrow.check()
    for rank in (0, RANK + 1):
        with pytest.raises(ShapeError, check=has_subject("sketch")):
            sketch.head(rank)


def test_scale_of_a_wide_sketch_leaves_under_one_percent_of_what_is_released_outside() -> None:
    images, group = _public()
    wide = Sketch.fit(images, group, RANK, GROUPS, released_rank=2)
    norm = wide.head(2).of(images, torch.zeros(600), LinearPath()).norm(dim=1)
    assert 0 < float((norm > 1 + 1e-6).float().mean()) < 0.01
    assert (
        float(wide.of(images, torch.zeros(600), LinearPath()).norm(dim=1).mean())
        > float(norm.mean()) + 0.01
    )
