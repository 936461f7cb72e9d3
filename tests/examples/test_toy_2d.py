"""The toy in the plane: its closed form against this suite's, its figure with exact experts, the script itself."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from torch import Tensor

from ddm.ensemble import Ensemble
from tests.support.gaussian_mixture import GaussianMixture

EXAMPLE = Path(__file__).parents[2] / "examples" / "toy_2d"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, as Python finds it when it is started: its folder comes first."""
    monkeypatch.syspath_prepend(EXAMPLE)
    for name in ("run", "world", "picture"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import run  # type: ignore[import-not-found]

    module: ModuleType = run
    return module


def test_closed_form_of_the_toy_agrees_with_another_derivation(toy: ModuleType) -> None:
    world = toy.islands()
    variance_CD = world.std_C.square()[:, None].expand(-1, 2)
    other = GaussianMixture(world.mean_CD, variance_CD, world.weight_C, world.silo_C)
    random = torch.Generator().manual_seed(0)
    x_BD = 2 * torch.randn(200, 2, generator=random, dtype=torch.float64)
    t_B = torch.rand(200, generator=random, dtype=torch.float64)
    assert torch.allclose(world.velocity(x_BD, t_B), other.velocity(x_BD, t_B), atol=1e-10)
    for k in range(3):
        assert torch.allclose(world.velocity(x_BD, t_B, k), other.expert(k)(x_BD, t_B), atol=1e-10)
    assert not torch.allclose(world.velocity(x_BD, t_B, 0), other.expert(1)(x_BD, t_B), atol=1.0)
    assert other.prior_K == pytest.approx(toy.SHARES)


def test_figure_is_small_for_exact_experts_and_above_the_bound_for_wrong_weights(
    toy: ModuleType,
) -> None:
    world = toy.islands()

    def expert(k: int) -> object:
        def velocity(x_BD: Tensor, t_B: Tensor) -> Tensor:
            return torch.as_tensor(world.velocity(x_BD.double(), t_B.double(), k)).float()

        return velocity

    silos = [world.draw(round(toy.NUM_POINTS * share), k, k) for k, share in enumerate(toy.SHARES)]
    router = toy.counts_router(world.draw(toy.NUM_PUBLIC, 9), silos, 0)
    ensemble = Ensemble([expert(k) for k in range(3)], router, toy.SHARES, shape=(2,))  # type: ignore[misc]
    assert toy.relative_error(world, ensemble, "posterior", 1) < toy.BOUND / 4
    for wrong in ("uniform", "top-1"):
        assert toy.relative_error(world, ensemble, wrong, 1) > 2 * toy.BOUND


def run_script(out: Path, *more: str) -> tuple[int, str]:
    words = [sys.executable, str(EXAMPLE / "run.py"), "--out", str(out), *more]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=800)
    assert not result.stderr, result.stderr
    return result.returncode, result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_script_draws_its_picture_and_prints_the_error_last_and_fails_where_weights_or_experts_are_wrong(
    tmp_path: Path,
) -> None:
    code, last = run_script(tmp_path)
    assert code == 0, last
    assert last.startswith("relative error of the ensemble's velocity, posterior weights: 0.0")
    with Image.open(tmp_path / "toy_2d.png") as picture:
        assert picture.width > 1500
    for wrong in ("uniform", "top-1"):
        # the same experts, from their checkpoints
        code, last = run_script(tmp_path, "--weights", wrong)
        assert code == 1, last
    code, last = run_script(tmp_path, "--steps", "20")
    assert code == 1, last
