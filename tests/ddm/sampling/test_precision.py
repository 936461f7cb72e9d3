"""The arithmetic of experts: other dtypes, autocast regions, devices, and what an ensemble says of itself."""

import copy

import pytest
import torch

from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import MathError
from ddm.loading.ensemble import load_ensemble, on_path, open_ensemble
from ddm.loading.release import open_release
from ddm.models import build_expert
from ddm.protocol.architecture import ClassCondition
from ddm.protocol.learning import ExpertObjective
from ddm.sampling.expert_cache import LazyExperts, move_experts
from ddm.sampling.options import sampling_keywords
from tests.conftest import PublishedRelease
from tests.ddm.system.test_devices import CLASS, DIT, MMDIT, SHAPE, TEXT, UNET, experts
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import UninformedRouter, four_silos
from tests.support.pretend_gpu import pretend_gpu


def ensemble(architecture: object = DIT, condition: object = CLASS) -> Ensemble:
    nets = experts(architecture, condition, "cpu")  # type: ignore[arg-type]
    return Ensemble(nets, UninformedRouter(2), [1.0, 2.0], SHAPE, condition=condition)  # type: ignore[arg-type]


def test_network_computes_in_float64_what_its_copy_in_float64_does() -> None:
    for architecture, condition, label in (
        (DIT, CLASS, 1),
        (UNET, CLASS, 0),
        (MMDIT, TEXT, torch.ones(2, 6)),
    ):
        with case(architecture=architecture.kind):  # type: ignore[attr-defined]
            made = ensemble(architecture, condition)
            x = torch.randn(
                3, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
            options = {"condition": label, "condition_prior": [0.5, 0.5]}
            wide = made.velocity(x, t, **options)  # type: ignore[arg-type]
            copies = [copy.deepcopy(net).double() for net in made.experts]  # type: ignore[attr-defined]
            expected = Ensemble(copies, UninformedRouter(2), [1.0, 2.0], SHAPE, condition=condition)  # type: ignore[arg-type]
            assert wide.dtype is torch.float64
            torch.testing.assert_close(
                wide, expected.velocity(x, t, **options), atol=1e-12, rtol=1e-12
            )  # type: ignore[arg-type]
            narrow = made.velocity(x.float(), t.float(), **options)  # type: ignore[arg-type]
            torch.testing.assert_close(narrow.double(), wide, atol=1e-4, rtol=1e-4)
            assert not torch.equal(narrow.double(), wide)


def test_samples_are_drawn_in_the_arithmetic_that_is_asked_for() -> None:
    made = ensemble()
    how = {
        "steps": 3,
        "strategy": "full",
        "condition": 1,
        "condition_prior": [0.5, 0.5],
        "guidance": 1.0,
    }
    drawn = {
        dtype: made.sample(4, **sampling_keywords(how | {"dtype": dtype}))
        for dtype in (None, torch.bfloat16, torch.float64)
    }  # type: ignore[arg-type]
    assert {samples.images.dtype for samples in (drawn[None], drawn[torch.bfloat16])} == {
        torch.float32
    }
    assert drawn[torch.float64].images.dtype is torch.float64
    exact = drawn[torch.float64].images
    spread = float(exact.std())
    assert 0 < float((drawn[None].images - exact).abs().max()) < 1e-3 * spread
    assert 1e-4 * spread < float((drawn[torch.bfloat16].images - exact).abs().max()) < 0.2 * spread
    for where in (torch.bfloat16, torch.float64):
        assert torch.equal(
            made.to(where).sample(4, **sampling_keywords(how)).images, drawn[where].images
        )  # type: ignore[arg-type]
    with pytest.raises(MathError, check=has_subject("dtype")):
        made.to(torch.float16)


def test_autocast_region_of_the_caller_lowers_experts_alone(published: PublishedRelease) -> None:
    made = load_ensemble(open_release(published.release, root=published.root, state=None))
    for strategy in ("full", "sample", "lock"):
        plain = made.sample(3, strategy=strategy, steps=2)
        with torch.autocast("cpu", torch.bfloat16):
            inside = made.sample(3, strategy=strategy, steps=2)
        assert inside.images.dtype is torch.float32
        assert torch.equal(
            inside.images,
            made.sample(
                3, strategy=strategy, steps=2, options=SamplingOptions(dtype=torch.bfloat16)
            ).images,
        )
        assert 0 < float((inside.images - plain.images).abs().max()) < 0.5
    x = torch.randn(3, *made.shape, generator=torch.Generator().manual_seed(1))
    t = torch.full((3,), 0.4)
    expected = made.posterior(x, t)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made.posterior(x, t), expected)
        assert made.velocity(x, t).dtype is torch.float32
    assert made.velocity(x.double(), t.double()).dtype is torch.float64
    torch.testing.assert_close(
        made.posterior(x.double(), t.double()).float(), expected.float(), atol=1e-4, rtol=1e-4
    )


def test_function_of_float64_is_sampled_with_its_precision() -> None:
    mixture = four_silos()
    exact = Ensemble(mixture.experts(), mixture, mixture.prior_K, (2,), dtype=torch.float64)
    one, other = (
        exact.sample(
            1, steps=20, strategy="full", options=SamplingOptions(solver="rk4", dtype=dtype)
        )
        for dtype in (None, torch.float32)
    )
    assert one.latents.dtype is torch.float64 and other.latents.dtype is torch.float32
    assert 0 < float((one.latents - other.latents).abs().max()) < 1e-4


def test_ensemble_is_copied_to_a_device_and_says_where_it_is() -> None:
    made = ensemble()
    with pretend_gpu() as gpu:
        there = made.to("cuda", torch.bfloat16)
        nets = [there.experts[k] for k in range(2)]
        assert all(
            gpu.device_of(parameter).type == "cuda"
            for net in nets
            for parameter in net.parameters()  # type: ignore[attr-defined]
        )
        networks = [made.experts[k] for k in range(2)]
        assert all(
            gpu.device_of(weight).type == "cpu"
            for network in networks
            for weight in network.parameters()  # type: ignore[attr-defined]
        )
        images = (
            there.to(torch.float32)
            .sample(2, steps=2, condition=1, options=SamplingOptions(condition_prior=[0.5, 0.5]))
            .images
        )
    assert torch.equal(
        images,
        made.sample(
            2, steps=2, condition=1, options=SamplingOptions(condition_prior=[0.5, 0.5])
        ).images,
    )
    text = repr(there)
    assert len(text.splitlines()) == 2 and "tensor" not in text
    assert all(
        word in text
        for word in ("2 experts", str(SHAPE), "LinearPath", "UninformedRouter", "cuda", "bfloat16")
    )
    assert made.to("cpu").experts[0] is made.experts[0]
    function = four_silos().expert(0)
    assert move_experts([function], "cpu")[0] is function


def test_experts_that_are_loaded_on_first_use_are_loaded_onto_the_device() -> None:
    net = build_expert(DIT, SHAPE, condition=ClassCondition(num_classes=2))
    lazy = LazyExperts(lambda k: net, [1], 1)
    with pretend_gpu() as gpu:
        there = move_experts(lazy, "cuda")
        assert isinstance(there, LazyExperts) and there.loaded_bytes == 0
        assert gpu.device_of(next(there[0].parameters())).type == "cuda"  # type: ignore[attr-defined]


def test_expert_on_another_path_is_a_network_like_any_other() -> None:
    net = build_expert(DIT, SHAPE)
    converted = on_path(net, ExpertObjective(path="cosine_vp", prediction="eps"), LinearPath())
    assert len(list(converted.parameters())) == len(list(net.parameters()))  # type: ignore[attr-defined]


def test_state_may_be_named_by_a_text(published: PublishedRelease, tmp_path: object) -> None:
    opened = open_ensemble(
        str(published.release), root=str(published.root), state=f"{tmp_path}/state"
    )
    assert (
        opened.release
        == open_release(published.release, root=published.root, state=None).manifest_digest
    )
    assert (
        opened.sample(1, steps=1).release == opened.release and len(repr(opened).splitlines()) == 2
    )
