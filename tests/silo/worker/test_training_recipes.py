"""What a silo's experts are trained on and for, as the plan asks: its own objective, classes, a public expert."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm.errors import DataError, DigestError, DocumentError, MissingFileError
from ddm.io.tensors import load_tensors, save_tensors, spec_of
from ddm.loading.plan import PlanFiles
from ddm.models import MAX_WEIGHT, build_expert, load_expert
from ddm.partition.clustering import Clusters
from ddm.privacy.secret_stream import make_secret
from ddm.protocol.base import File
from ddm.protocol.plan import Plan
from ddm.protocol.weight_privacy import DpSgdMechanism
from ddm.training.config import Engine, TrainingSettings
from ddm.training.planned import BaseExpert, PlannedExpert
from silo.config import Policy, SiloSettings
from silo.data.cohort import Cohort
from silo.plan.workspace import Workspace
from silo.worker.training import SiloTraining, num_classes, train_experts
from tests.support.documents import base_document, plan_document, to_bytes

SHAPE = (1, 4, 4)
NUM = 60
RECIPE = {
    "num_steps": 6,
    "batch_size": 8,
    "learning_rate": 0.01,
    "weight_decay": 0.0,
    "ema_decay": 0.5,
}
CLASSES = {"kind": "class", "num_classes": 3}
TEXT = {"kind": "text", "dim": 3, "max_tokens": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dit": {"kind": "dit", "patch": 2, "hidden": 8, "depth": 1, "heads": 2},
    "mmdit": {"kind": "mmdit", "patch": 2, "hidden": 16, "depth": 2, "heads": 2, "shared_depth": 1},
    "unet": {
        "kind": "unet",
        "channels": [8, 8],
        "attention": [False, True],
        "num_res_blocks": 1,
        "head_channels": 8,
        "norm_groups": 4,
    },
}
ONE_GROUP = Clusters(
    torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
)


def plan(
    adaptation: dict[str, Any] | None = None,
    base: File | None = None,
    kind: str = "dit",
    **changes: object,
) -> Plan:
    document = plan_document(data={"shape": list(SHAPE), "range": [-1.0, 1.0]}, **changes)
    document["expert"] |= {
        "architecture": ARCHITECTURES[kind],
        "training": RECIPE,
        "adaptation": adaptation or {"kind": "full"},
    }
    if base:
        document["files"].append(base.model_dump())
        document["base"] = base_document(base.digest)
    return Plan.parse(to_bytes(document), subject="plan")


def cohort(label_N: Tensor | None = None) -> Cohort:
    images = torch.rand(NUM, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return Cohort(images, "a" * 64, torch.arange(NUM), NUM, label_N)


def trained(
    the_plan: Plan,
    folder: Path,
    images: Cohort | None = None,
    silo_id: str = "north",
    **options: Any,
) -> dict[str, Tensor]:
    """The tensors of the one expert that `silo_id` trains."""
    files = PlanFiles(encoder=None, clusters=ONE_GROUP, sketch=None)  # type: ignore[arg-type]  # neither is used
    work = Workspace(folder / silo_id)
    fine_N = torch.zeros(NUM, dtype=torch.int64)
    work.expert_path(silo_id).parent.mkdir(parents=True)
    training = SiloTraining(
        plan=the_plan,
        files=files,
        cohort=images or cohort(),
        fine_N=fine_N,
        work=work,
        policy=Policy(),
        silo_id=silo_id,
        settings=TrainingSettings(device="cpu"),
        **options,
    )
    train_experts(training, on_progress=lambda progress: None, should_stop=lambda: False)
    expert = build_expert(the_plan.expert.architecture, SHAPE, condition=the_plan.condition)
    specs = {name: spec_of(value) for name, value in expert.state_dict().items()}
    return load_tensors(work.expert_path(silo_id), specs, max_bytes=1 << 24)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_silo_trains_its_own_exception_and_its_neighbours_what_all_train(tmp_path: Path) -> None:
    other = {"silo_id": "north", "path": "cosine_vp", "prediction": "eps"}
    plain = plan()
    mixed = plan(objective={"path": "linear", "prediction": "velocity", "exceptions": [other]})
    throughout = plan(objective={"path": "cosine_vp", "prediction": "eps"})
    north = trained(mixed, tmp_path / "mixed")
    assert same(north, trained(throughout, tmp_path / "throughout"))
    assert not same(north, trained(plain, tmp_path / "plain"))
    assert same(
        trained(mixed, tmp_path / "mixed", silo_id="east"),
        trained(plain, tmp_path / "plain", silo_id="east"),
    )


def test_expert_is_told_its_images_classes(tmp_path: Path) -> None:
    by_class = plan(condition=CLASSES)
    assert num_classes(by_class) == 3
    one, other = (
        trained(by_class, tmp_path / str(n), cohort(torch.arange(NUM) % n)) for n in (2, 3)
    )
    assert not same(one, other)


def test_images_without_classes_are_refused_when_the_expert_is_to_be_told_them(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match="class"):
        trained(plan(condition=CLASSES), tmp_path)


def test_plan_whose_condition_and_histogram_count_different_classes_is_refused() -> None:
    statistics = plan_document()["statistics"] | {
        "class_counts": {"epsilon": 1.0, "num_classes": 4}
    }
    with pytest.raises(DocumentError, match="number of classes"):
        plan(condition=CLASSES, statistics=statistics)
    assert num_classes(plan(statistics=statistics)) == 4


def made_network(the_plan: Plan) -> nn.Module:
    """A network of the plan that answers something, as a trained one does."""
    network = build_expert(
        the_plan.expert.architecture, SHAPE, condition=the_plan.condition, seed=9
    )
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return network


def write_bundle(folder: Path, network: nn.Module) -> File:
    """Write the plan's files, among them a public expert."""
    path = folder / "plan" / "base.safetensors"
    path.parent.mkdir(parents=True)
    save_tensors(path, network.state_dict())
    return File.of("plan/base.safetensors", path)


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Path, File]:
    """The plan's files, among them a public expert."""
    folder = tmp_path / "bundle"
    return folder, write_bundle(folder, made_network(plan()))


ADAPTATIONS = {
    "full": {"kind": "full", "base": "plan/base.safetensors"},
    "lora": {"kind": "lora", "rank": 2, "alpha": 4.0},
    "partial": {"kind": "partial", "trained": ["head"]},
}


@pytest.mark.parametrize("kind", sorted(ADAPTATIONS))
def test_expert_from_a_public_one_is_released_whole_and_differs_only_where_it_was_trained(
    tmp_path: Path, bundle: tuple[Path, File], kind: str
) -> None:
    folder, file = bundle
    base = load_expert(plan().expert.architecture, SHAPE, folder, file).state_dict()
    whole = trained(plan(ADAPTATIONS[kind], file), tmp_path, bundle=folder)
    changed = {name for name in base if not torch.equal(base[name], whole[name])}
    trained_names = {
        "full": set(base),
        "lora": {name for name in base if base[name].dim() == 2},
        "partial": {"head.weight", "head.bias"},
    }
    assert changed == trained_names[kind]
    if kind == "full":
        # Six steps of a hundredth each: the expert is still near the base, and far from a fresh network.
        moved = torch.cat([(whole[name] - base[name]).flatten() for name in base])
        fresh = build_expert(plan().expert.architecture, SHAPE, seed=0).state_dict()
        distance = torch.cat([(whole[name] - fresh[name]).flatten() for name in base])
        assert 0 < float(moved.abs().max()) <= 0.1 < float(distance.abs().max())


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_expert_answers_as_the_base_at_first_and_then_trains_all_weights_of_any_architecture(
    tmp_path: Path, kind: str
) -> None:
    changes: dict[str, Any] = {}
    random = torch.Generator().manual_seed(2)
    x_B = torch.randn(3, *SHAPE, generator=random)
    t_B = torch.tensor([0.1, 0.5, 0.9])
    inputs = {"images": cohort().images}
    answer_inputs: tuple[Tensor, ...] = (x_B, t_B)
    if kind == "mmdit":
        changes["condition"] = TEXT
        texts = torch.randn(NUM, 2, 3, generator=random)
        # An image without a text, so that the vector of no text is trained too.
        texts[: NUM // 2] = 0.0
        inputs["labels"] = texts
        answer_inputs = (x_B, t_B, texts[-3:])
    network = made_network(plan(kind=kind, **changes))
    folder = tmp_path / "bundle"
    file = write_bundle(folder, network)
    from_base = plan(ADAPTATIONS["full"], file, kind, **changes)
    expert = PlannedExpert(from_base, "north", 0, BaseExpert(folder, file), Engine(device="cpu"))
    start = expert.start()
    assert same(start.state_dict(), network.state_dict())
    with torch.inference_mode():
        answers = network(*answer_inputs)
        assert float(answers.abs().max()) > 0.1
        torch.testing.assert_close(start(*answer_inputs), answers, atol=1e-5, rtol=1e-5)

    result = expert.train(
        inputs,
        tmp_path / "expert.safetensors",
        tmp_path / "checkpoints",
        lambda progress: None,
        lambda: False,
    )
    assert result is not None
    whole = load_tensors(tmp_path / "expert.safetensors", None, max_bytes=1 << 20)
    base = network.state_dict()
    assert whole.keys() == base.keys()
    moved = {name: float((whole[name] - base[name]).abs().max()) for name in base}
    # Six steps of AdamW at a hundredth each.
    assert all(0 < move <= 0.1 for move in moved.values()), moved


def test_weights_that_training_takes_beyond_the_bound_end_at_it_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A base at the bound, whose normalised inputs add up to 0, crosses it wherever an image asks for it."""
    base = build_expert(plan().expert.architecture, SHAPE, seed=9).state_dict()
    base["head.weight"].fill_(MAX_WEIGHT)
    (tmp_path / "bundle" / "plan").mkdir(parents=True)
    path = tmp_path / "bundle" / "plan" / "base.safetensors"
    save_tensors(path, base)
    partial = plan(ADAPTATIONS["partial"], File.of("plan/base.safetensors", path))
    weights = trained(partial, tmp_path / "bound", bundle=tmp_path / "bundle")
    assert (
        float(weights["head.weight"].abs().max()) == MAX_WEIGHT
        and float(weights["head.weight"].min()) < MAX_WEIGHT
    )
    assert "weights were not finite or above 10000" in caplog.text

    def spoiled(weights: dict[str, Tensor], adaptation: object) -> dict[str, Tensor]:
        weights["head.weight"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        return weights

    monkeypatch.setattr("ddm.training.planned.merged", spoiled)
    weights = trained(partial, tmp_path / "lost", bundle=tmp_path / "bundle")
    assert weights["head.weight"][0, :3].tolist() == [0.0, 0.0, 0.0] and bool(
        weights["head.weight"][0, 3:].all()
    )


def flip_a_byte(folder: Path) -> None:
    path = folder / "plan" / "base.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [(flip_a_byte, DigestError), (None, MissingFileError)],
    ids=["another file", "no folder"],
)
def test_public_expert_that_the_plan_does_not_list_is_not_trained_from(
    tmp_path: Path,
    bundle: tuple[Path, File],
    spoil: Callable[[Path], None] | None,
    error: type[Exception],
) -> None:
    folder, file = bundle
    if spoil:
        spoil(folder)
    with pytest.raises(error):
        trained(plan(ADAPTATIONS["lora"], file), tmp_path, bundle=folder if spoil else None)


def test_plan_that_starts_from_a_file_that_it_does_not_list_is_refused() -> None:
    with pytest.raises(DocumentError, match="must be listed"):
        plan(ADAPTATIONS["lora"])


def test_settings_of_a_site_say_how_its_machine_trains() -> None:
    said = {
        "silo_id": "north",
        "data": "d",
        "federation": "f",
        "address": "a:1",
        "root_digest": "a" * 64,
    }
    assert SiloSettings.model_validate(said).training == TrainingSettings()
    table = {"device": "cpu", "accumulate": 4, "recompute": True}
    assert SiloSettings.model_validate(
        said | {"training": table}
    ).training == TrainingSettings.model_validate(table)


def test_private_training_starts_from_the_base_too(
    tmp_path: Path, bundle: tuple[Path, File]
) -> None:
    folder, file = bundle
    document = json.loads(plan(ADAPTATIONS["full"], file).encode())
    document["expert"]["privacy"] = {
        "kind": "dp_sgd",
        "epsilon": 4.0,
        "delta": 1e-6,
        "units_per_step": 4,
        "images_per_unit": 1,
        "draws": 1,
    }
    private = Plan.parse(to_bytes(document), subject="plan")
    paid = DpSgdMechanism(noise_multiplier=0.5, rate=4 / NUM, steps=RECIPE["num_steps"])
    expert = PlannedExpert(
        private, "north", 0, BaseExpert(folder, file), Engine(device="cpu"), stops=False, paid=paid
    )
    secret = tmp_path / "secret"
    make_secret(secret)
    images = cohort()
    inputs = {"images": images.images, "units": images.unit_N}
    result = expert.train(
        inputs,
        tmp_path / "expert.safetensors",
        tmp_path / "checkpoints",
        lambda progress: None,
        lambda: False,
        secret=secret,
    )
    assert result is not None
    base = load_expert(private.expert.architecture, SHAPE, folder, file).state_dict()
    whole = load_tensors(tmp_path / "expert.safetensors", None, max_bytes=1 << 20)
    moved = {name: float((whole[name] - base[name]).abs().max()) for name in base}
    # Six steps of AdamW at a hundredth each, whatever the noise is.
    assert all(0 < move <= 0.1 for move in moved.values()), moved
