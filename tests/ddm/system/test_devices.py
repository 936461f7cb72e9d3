"""What runs on a GPU has all it needs there, and hands back what a CPU would: by a GPU that is only pretended."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddm.diffusion.path import Expert, LinearPath
from ddm.distillation.dataset import SampleRecipe, own_samples
from ddm.distillation.distill import distill
from ddm.distillation.student import load_student
from ddm.encoders.autoencoder import AutoencoderKl, build_autoencoder
from ddm.encoders.text import TextEncoder, pin
from ddm.ensemble import Ensemble, SamplingOptions
from ddm.errors import SetupError
from ddm.loading.ensemble import load_ensemble, on_path
from ddm.loading.release import open_release
from ddm.models import build_expert
from ddm.protocol.architecture import (
    Architecture,
    ClassCondition,
    Condition,
    Dit,
    Mmdit,
    NoCondition,
    TextCondition,
    Unet,
)
from ddm.protocol.latent import AutoencoderSize
from ddm.protocol.learning import ExpertObjective
from ddm.protocol.routers import SamplesSettings
from ddm.routers.labelled import Labelled
from ddm.routers.samples import draw_from_experts, fit_samples
from ddm.system.devices import computes_in_bf16, device_named
from ddm.training.config import Engine
from ddm.training.loop import TrainingRun
from tests.conftest import PublishedRelease
from tests.ddm.cli.test_distill import distilled
from tests.ddm.training.test_loop import Run, same_bytes, settings
from tests.support.errors import has_subject
from tests.support.gaussian_mixture import UninformedRouter
from tests.support.group_program import make_network, make_texts
from tests.support.pretend_gpu import GPU, pretend_gpu
from tests.support.publishing import least_memory
from tests.support.text_encoders import make_encoder, save_encoder

SHAPE = (1, 8, 8)
NOTHING = NoCondition()
CLASS = ClassCondition(num_classes=3, drop=0.1)
TEXT = TextCondition(dim=6, max_tokens=4, drop=0.1)
DIT = Dit(patch=2, hidden=16, depth=1, heads=2)
MMDIT = Mmdit(patch=2, hidden=16, depth=1, heads=2)
UNET = Unet(
    channels=(8, 16), attention=(False, True), num_res_blocks=1, head_channels=8, norm_groups=4
)
MASKED = {"mask_ratio": 0.5, "unmasked_share": 0.2}
ASKED: dict[str, object] = {
    "class": 1,
    "text": torch.rand(2, 6, generator=torch.Generator().manual_seed(1)),
}


def test_device_is_the_gpu_where_there_is_one_and_a_gpu_that_is_not_there_is_refused() -> None:
    assert device_named().type == device_named("cpu").type == "cpu"
    with pytest.raises(SetupError, check=has_subject("training.device")):
        device_named("cuda", setting="training.device")
    with pretend_gpu():
        assert device_named().type == device_named("cuda").type == "cuda"
        assert device_named("cpu").type == "cpu"


def test_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    net = nn.Linear(2, 2)
    with pretend_gpu() as gpu:
        x = torch.ones(3, 2).to("cuda")
        with pytest.raises(RuntimeError, match="two devices"):
            net(x)
        net.to("cuda")
        assert net(x).device == net.weight.device == (x + torch.ones(())).device == GPU
        assert (
            gpu.device_of(torch.zeros(2, device="cuda"))
            == gpu.device_of(torch.zeros_like(x))
            == GPU
        )
        for wrong in (
            lambda: x + torch.ones(2),
            lambda: torch.ones(3)[x.bool()[:, 0]],
            lambda: torch.cat([x, x.cpu()]),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                wrong()
        with pytest.raises(TypeError, match="cuda"):
            x.numpy()
        assert x.cpu().numpy().sum() == 6
        assert x[torch.tensor([0, 2])].device == GPU


def experts(architecture: Architecture, condition: Condition, device: str) -> list[Expert]:
    """Two networks, of which one learned eps on another path."""
    built = [build_expert(architecture, SHAPE, condition=condition, seed=seed) for seed in range(2)]
    for net in built:
        # what begins at 0 would hide what lies before it
        for (
            name,
            parameter,
        ) in net.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            nn.init.normal_(
                parameter, std=0.1, generator=generator
            ) if not parameter.any() else None
    first, second = (net.eval().requires_grad_(False).to(device) for net in built)
    return [
        first,
        on_path(second, ExpertObjective(path="cosine_vp", prediction="eps"), LinearPath()),
    ]


@pytest.mark.parametrize(
    ("architecture", "condition"),
    [
        (DIT, NOTHING),
        (DIT, CLASS),
        (DIT, TEXT),
        (MMDIT, TEXT),
        (UNET, NOTHING),
        (UNET, CLASS),
        (UNET, TEXT),
    ],
    ids=lambda condition: condition.kind,
)
def test_every_expert_is_sampled_on_a_gpu_as_on_a_cpu(
    architecture: Architecture, condition: Condition
) -> None:
    options = SamplingOptions(solver="dpm")
    words: dict[str, object] = {}
    if condition is not NOTHING:
        options = SamplingOptions(solver="dpm", condition_prior=[0.5, 0.5])
        words = {"condition": ASKED.get(condition.kind), "guidance": 1.5}

    def drawn(device: str, strategy: str) -> Tensor:
        nets = experts(architecture, condition, device)
        router = UninformedRouter(2)
        made = Ensemble(nets, router, [1.0, 2.0], SHAPE, device=device, condition=condition)
        return made.sample(
            3,
            strategy=strategy,
            steps=2,
            seed=1,
            **words,
            options=options,
        ).images  # type: ignore[arg-type]

    for strategy in ("full", "lock"):
        here = drawn("cpu", strategy)
        with pretend_gpu() as gpu:
            there = drawn("cuda", strategy)
            assert gpu.device_of(there).type == "cpu"
        assert torch.equal(here, there)


@pytest.mark.parametrize("little", [False, True])
@pytest.mark.parametrize(
    "strategy", ["full", "sample", "lock", "top-1", "top-k", "nucleus", "threshold"]
)
def test_release_is_sampled_on_a_gpu_as_on_a_cpu(
    published: PublishedRelease, strategy: str, little: bool
) -> None:
    release = open_release(published.release, root=published.root, state=None)
    draw: Callable[[Ensemble], object] = partial(
        Ensemble.sample,
        num=4,
        strategy=strategy,
        steps=3,
        options=SamplingOptions(router_every=2),
    )
    here = draw(load_ensemble(release))
    with pretend_gpu():
        there = draw(
            load_ensemble(
                release, device="cuda", memory_bytes=least_memory(release) if little else None
            )
        )
    assert torch.equal(here.images, there.images) and torch.equal(here.expert_N, there.expert_N)  # type: ignore[attr-defined]


def test_own_samples_of_readers_are_drawn_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    texts_NLD = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(2))

    def drawn(device: str) -> Tensor:
        nets = experts(DIT, TEXT, device)
        router = UninformedRouter(2)
        teacher = Ensemble(nets, router, [1.0, 2.0], SHAPE, device=device, condition=TEXT)
        settings = {"source": "here", "condition": TEXT, "texts": texts_NLD, "steps": 2}
        return own_samples(
            teacher,
            4,
            tmp_path / device,
            SampleRecipe(**settings),  # type: ignore[arg-type]
            on_progress=lambda steps, total: None,
        ).images

    here = drawn("cpu")
    with pretend_gpu():
        assert torch.equal(drawn("cuda"), here)


def test_student_is_drawn_taught_and_sampled_on_a_gpu_as_on_a_cpu(
    published: PublishedRelease, tmp_path: Path
) -> None:
    release = open_release(published.release, root=published.root, state=None)
    weights: dict[str, dict[str, Tensor]] = {}

    def taught(name: str, device: str, teacher: str) -> dict[str, Tensor]:
        ensemble = load_ensemble(release, device=device)
        plan = release.plan
        lessons = own_samples(
            ensemble,
            8,
            tmp_path / name,
            SampleRecipe(source="here", steps=2),
            on_progress=lambda num_done, total: None,
        )
        trained = distill(
            ensemble,
            build_expert(plan.expert.architecture, plan.expert_shape),
            lessons,
            settings(num_steps=3),
            TrainingRun(
                tmp_path / name / teacher,
                engine=Engine(device=device),  # type: ignore[arg-type]
            ),
            teacher=teacher,  # type: ignore[arg-type]
            source="here",
        )
        return trained.ema | {"lessons": lessons.images}

    for teacher in ("label", "drawn", "mixture"):
        weights["cpu"] = taught("here", "cpu", teacher)
        with pretend_gpu() as gpu:
            weights["cuda"] = taught("there", "cuda", teacher)
            assert all(gpu.device_of(tensor).type == "cpu" for tensor in weights["cuda"].values())
        assert same_bytes(weights["cpu"], weights["cuda"])

    out = tmp_path / "student.safetensors"
    assert distilled(published, out, "--num", 4, "--steps", 2) == 0
    here = load_student(out)[1].sample(2, steps=2).images
    with pretend_gpu():
        assert torch.equal(load_student(out, device="cuda")[1].sample(2, steps=2).images, here)


@pytest.mark.parametrize(("kind", "recipe"), [("dit", {}), ("dit", MASKED), ("mmdit", {})])
def test_expert_is_trained_in_two_goes_on_a_gpu_as_in_one_on_a_cpu(
    tmp_path: Path, kind: str, recipe: dict[str, float]
) -> None:
    def trained(folder: Path, device: str, stop: bool = False) -> dict[str, Tensor]:
        fields = {"device": device, "accumulate": 2, "checkpoint_s": 0.0}
        engine = Engine.model_validate(fields)
        run = Run(
            folder,
            settings(num_steps=9, **recipe),
            model=make_network(kind),
            labels=make_texts(kind),
            engine=engine,
        )
        return run((lambda: len(list(folder.glob("*.json"))) > 0) if stop else (lambda: False)).ema

    here = trained(tmp_path / "cpu", "cpu")
    with pretend_gpu():
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "gpu", "auto", stop=True)
        there = trained(tmp_path / "gpu", "auto")
    assert same_bytes(here, there)


def test_latents_are_encoded_and_decoded_on_a_gpu_as_on_a_cpu() -> None:
    size = AutoencoderSize(
        channels=(8, 8),
        attention=(False, False),
        latent_channels=3,
        num_res_blocks=1,
        norm_groups=4,
    )
    x = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))

    def both() -> tuple[Tensor, Tensor]:
        latent = AutoencoderKl(build_autoencoder(size, SHAPE, seed=0), size, SHAPE)
        return latent.encode(x), latent.decode(latent.encode(x))

    here = both()
    with pretend_gpu() as gpu:
        there = both()
        assert all(gpu.device_of(tensor).type == "cpu" for tensor in there)
    assert all(map(torch.equal, here, there))


def test_texts_are_encoded_on_a_gpu_as_on_a_cpu_up_to_bf16(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder", make_encoder("T5EncoderModel"))
    condition = pin(folder, max_tokens=5, drop=0.1)
    prompts = ["left", "right and left", ""]
    here = TextEncoder.open(folder, condition).encode(prompts)
    with pretend_gpu() as gpu:
        there = TextEncoder.open(folder, condition).encode(prompts)
        assert gpu.device_of(there).type == "cpu"
    assert there.dtype == torch.float32
    assert 0 < float((here - there).abs().max()) < 0.03 * float(here.abs().max())


def test_samples_router_is_trained_on_a_gpu_as_on_a_cpu() -> None:
    sizes = SamplesSettings(patch=4, hidden=16, depth=1, heads=2, num_steps=6, images_per_expert=8)

    def fitted(device: str) -> dict[str, Tensor]:
        drawn_EN = draw_from_experts(
            experts(DIT, NOTHING, device), SHAPE, 8, 0, LinearPath(), None, device=device
        )
        return fit_samples(
            Labelled.drawn(drawn_EN), sizes, LinearPath(), 0, device=device
        ).tensors() | {"drawn": drawn_EN}

    here = fitted("cpu")
    with pretend_gpu() as gpu:
        there = fitted("cuda")
        assert all(gpu.device_of(tensor).type == "cpu" for tensor in there.values())
    assert same_bytes(here, there)


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, False),
        ({"avx512_f": True, "cpu_name": "AMD EPYC"}, False),
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, True),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, False),
        ({"amx_bf16": True, "cpu_name": "Intel Xeon"}, True),
    ],
)
def test_auto_is_bf16_where_products_in_it_are_faster(
    has: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    cpu = torch.device("cpu")
    assert computes_in_bf16("auto", cpu) is expected
    assert computes_in_bf16("bf16", cpu)
    assert not computes_in_bf16("fp32", cpu)
