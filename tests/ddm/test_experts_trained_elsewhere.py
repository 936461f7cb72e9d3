"""The how-to's adapters as they stand there: experts of diffusers and plain functions in one ensemble with our own."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.diffusion.path import CosinePath, LinearPath, path_named, x_0_and_eps
from ddm.diffusion.schedules import DiscretePath
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.models import build_expert
from ddm.protocol.architecture import ClassCondition, Dit
from tests.support.gaussian_mixture import UninformedRouter, four_silos

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "experts-trained-elsewhere.md"
SHAPE = (3, 8, 8)
OWN = Dit(patch=2, hidden=16, depth=1, heads=2)


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", HOW_TO.read_text("utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def adapters() -> SimpleNamespace:
    """What the how-to's first block defines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")
        namespace: dict[str, Any] = {}
        exec(blocks()[0], namespace)
    return SimpleNamespace(**namespace)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, adapters: SimpleNamespace) -> Path:
    """Small networks with made weights, saved by diffusers."""
    path = tmp_path_factory.mktemp("elsewhere")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        dit = adapters.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=6,
            num_layers=1,
            sample_size=8,
            num_embeds_ada_norm=5,
        )
        unet = adapters.UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )
    dit.save_pretrained(path / "dit")
    unet.save_pretrained(path / "unet")
    return path


def inputs(t: float) -> tuple[Tensor, Tensor]:
    x_B = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    return x_B, torch.full((2,), t)


def by_scheduler(net: Any, x_B: Tensor, step: int, *more: Tensor) -> Tensor:
    """x_0 as diffusers' own scheduler gets it from a network at a whole step, on its own noised sample."""
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(1000)
    answer = net(x_B, torch.full((len(x_B),), step), *more, return_dict=False)[0][:, : x_B.shape[1]]
    x_0: Tensor = scheduler.step(answer, step, x_B).pred_original_sample
    return x_0


@pytest.mark.parametrize("kind", ["unet", "dit"])
def test_adapted_network_sees_the_x_0_that_diffusers_scheduler_sees(
    adapters: SimpleNamespace, folders: Path, kind: str
) -> None:
    canonical = CosinePath()
    ddpm = path_named("ddpm_linear")
    expert = getattr(adapters, f"from_{kind}")(folders / kind, canonical)
    loaded = {"unet": adapters.UNet2DModel, "dit": adapters.DiTTransformer2DModel}[kind]
    net = loaded.from_pretrained(folders / kind, local_files_only=True).eval()
    with torch.no_grad():
        for step in (50, 500, 900):
            own_t = torch.tensor(step / 999)
            t_B = canonical.time_of(ddpm.alpha(own_t), ddpm.sigma(own_t)).expand(2)
            x_B, _ = inputs(0.0)
            x_0, _ = x_0_and_eps(canonical, x_B, expert(x_B, t_B), t_B)
            more = (torch.full((2,), 5),) if kind == "dit" else ()
            expected = by_scheduler(net, x_B, step, *more)
            scale = float(expected.abs().max())
            assert (x_0 - expected).abs().max() < 2e-3 * scale
            assert (x_0 - by_scheduler(net, x_B, step - 20, *more)).abs().max() > 4e-3 * scale, (
                "another step"
            )


def test_classes_reach_the_network_and_the_null_condition_is_its_last(
    adapters: SimpleNamespace, folders: Path
) -> None:
    expert = adapters.from_dit(folders / "dit")
    (x_B, t_B) = inputs(0.5)
    with torch.no_grad():
        null = expert(x_B, t_B)
        assert torch.equal(null, expert(x_B, t_B, torch.full((2,), -1)))
        assert torch.equal(null, expert(x_B, t_B, torch.full((2,), 5)))
        assert not torch.allclose(null, expert(x_B, t_B, torch.tensor([0, 1])))


def test_adapted_networks_follow_the_ensemble_to_another_device_and_arithmetic(
    adapters: SimpleNamespace, folders: Path
) -> None:
    experts = [adapters.from_dit(folders / "dit"), adapters.from_unet(folders / "unet")]
    ensemble = Ensemble(experts, UninformedRouter(2), [0.5, 0.5], SHAPE)
    x_B, t_B = inputs(0.6)
    with torch.no_grad():
        expected = ensemble.velocity(x_B, t_B)
        in_float64 = ensemble.to(torch.float64).velocity(x_B.double(), t_B)
    torch.testing.assert_close(in_float64.float(), expected, rtol=1e-3, atol=1e-3)
    elsewhere = ensemble.to("meta").experts
    for number in range(2):
        network: Any = elsewhere[number]
        assert {weight.device.type for weight in network.parameters()} == {"meta"}


def test_own_and_foreign_experts_sample_together_and_mix_by_their_weights(
    adapters: SimpleNamespace, folders: Path
) -> None:
    edm = adapters.from_edm(lambda x, sigma: x / (1 + sigma[:, None, None, None].square()))
    own = build_expert(OWN, SHAPE, seed=0).eval().requires_grad_(False)
    experts = [own, adapters.from_unet(folders / "unet"), edm]
    ensemble = Ensemble(experts, UninformedRouter(3), [0.5, 0.3, 0.2], SHAPE)
    x_B, t_B = inputs(0.6)
    with torch.no_grad():
        expected = sum(
            weight * expert(x_B, t_B)
            for weight, expert in zip([0.5, 0.3, 0.2], experts, strict=True)
        )
        torch.testing.assert_close(ensemble.velocity(x_B, t_B), expected)
    drawn = ensemble.sample(12, steps=4)
    assert bool(drawn.images.isfinite().all()) and set(drawn.expert_N.tolist()) == {0, 1, 2}
    guided = Ensemble(
        [
            build_expert(OWN, SHAPE, condition=ClassCondition(num_classes=5)),
            adapters.from_dit(folders / "dit"),
        ],
        None,
        [1, 1],
        SHAPE,
        condition=ClassCondition(num_classes=5),
    ).sample(4, steps=2, condition=3, guidance=1.0, options=SamplingOptions(condition_prior=[1, 1]))
    assert bool(guided.images.isfinite().all())


def test_mixture_with_a_known_posterior_is_exact_with_experts_numbered_in_ddpm_steps(
    adapters: SimpleNamespace,
) -> None:
    """Two of four Gaussian silos answer as networks elsewhere do: eps by step number, and EDM's D(x, sigma)."""
    from diffusers import DDPMScheduler

    log_ratio = DDPMScheduler().alphas_cumprod.double()
    log_ratio = ((1 - log_ratio) / log_ratio).sqrt().log().numpy()
    path = DiscretePath("linear")
    mixture = four_silos()

    class Ratio(LinearPath):
        """The mixture noised to a ratio of sigma and alpha, as its own coefficients: x = x_0 + s eps at t = s."""

        def alpha(self, t: Tensor) -> Tensor:
            return torch.ones_like(t)

    noised = mixture.on(Ratio())

    def by_step(x_B: Tensor, step_B: Tensor) -> Tensor:
        s_B = torch.from_numpy(np.exp(np.interp(step_B.numpy(), np.arange(1000), log_ratio)))
        estimates = noised.denoised(
            x_B.double() * torch.hypot(torch.ones_like(s_B), s_B)[:, None],
            s_B,
            mixture.weights_of(1),
        )
        return estimates[1].to(x_B)

    def denoiser(x_B: Tensor, sigma_B: Tensor) -> Tensor:
        return noised.denoised(x_B, sigma_B, mixture.weights_of(2))[0]

    experts: list[Any] = mixture.experts()
    eps = lambda x_B, t_B: by_step(x_B, path.step(t_B))  # noqa: E731
    experts[1] = adapters.as_velocity(eps, "eps", path, LinearPath())
    experts[2] = adapters.from_edm(denoiser)
    ensemble = Ensemble(experts, mixture, mixture.prior_K, (2,))
    t_B = torch.linspace(0.02, 0.95, 300, dtype=torch.float64)
    x_B = 2 * torch.randn(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = (ensemble.velocity(x_B, t_B) - mixture.velocity(x_B, t_B)).abs().max()
    assert error < 2e-4, "what is left is diffusers' float32"
    experts[1] = adapters.as_velocity(eps, "eps", path_named("scaled_linear"), LinearPath())
    mistaken = Ensemble(experts, mixture, mixture.prior_K, (2,))
    assert (mistaken.velocity(x_B, t_B) - mixture.velocity(x_B, t_B)).abs().max() > 0.01
    drawn = replace(ensemble, router=None).sample(4000, steps=30)
    for k in (1, 2):
        own = mixture.weights_of(k)[:, None]
        mean = drawn.images[drawn.expert_N == k].double().mean(0)
        assert torch.allclose(mean, (own / own.sum() * mixture.mean_CD).sum(0), atol=0.35)


def test_how_to_joins_a_release_and_a_network_as_it_says(
    adapters: SimpleNamespace, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = Ensemble([build_expert(OWN, SHAPE).eval()], None, [0.6], SHAPE, expert_ids=["north"])
    monkeypatch.setattr("ddm.open_ensemble", lambda folder, root: released, raising=False)
    monkeypatch.chdir(folders)
    namespace = {"from_unet": adapters.from_unet}
    exec(blocks()[1], namespace)
    joined: Any = namespace["joined"]
    assert joined.expert_ids == ["north", "unet"] and joined.prior == [0.6, pytest.approx(0.2)]
