"""Private training as a whole: who enters a step, what is added to it, and runs that are killed or shared."""

import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from ddm.errors import DataError, SetupError
from ddm.models import build_expert
from ddm.models.adaptation import adapt
from ddm.protocol.architecture import Dit
from ddm.protocol.learning import FullAdaptation, LoraAdaptation
from ddm.protocol.plan import Plan
from ddm.protocol.weight_privacy import DpSgd, DpSgdMechanism
from ddm.training.batches import Examples
from ddm.training.config import Engine, TrainingSettings
from ddm.training.distributed import training_process
from ddm.training.jobs import TrainingTask
from ddm.training.objective import TrainingObjective
from ddm.training.planned import PlannedExpert
from ddm.training.private import (
    STEPS_PER_CLIP,
    PrivateSteps,
    PrivateTraining,
    clipped,
    noise_of,
    sensitivity,
)
from ddm.training.state import TrainingState
from ddm.training.unit_gradients import UnitSamples
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.forked import fork_process, wait_for_exit
from tests.support.jobs import ARCHITECTURES, NUM, RECIPE, SHAPE, SmallJob
from tests.support.recipes import training
from tests.support.seeded import SeededNoise

UNIT_N = torch.arange(NUM) // 3  # the last of 14 patients has one image
TERMS = {"epsilon": 8.0, "delta": 1e-5, "units_per_step": 4, "images_per_unit": 2, "draws": 2}
PAID = DpSgdMechanism(noise_multiplier=0.8, rate=4 / 14, steps=30)


def paid(noise: float) -> DpSgdMechanism:
    return PAID.model_copy(update={"noise_multiplier": noise})


def wanted(
    noise: float = PAID.noise_multiplier, unit_N: Tensor = UNIT_N, **training: object
) -> TrainingTask:
    """An expert to train privately; patients have up to three images, of which a step takes two."""
    document = plan_document(data={"shape": list(SHAPE), "range": [-1.0, 1.0]})
    changed = RECIPE | {"num_steps": 30} | training
    document["expert"] |= {"architecture": ARCHITECTURES["dit"], "training": changed}
    document["expert"]["privacy"] = {"kind": "dp_sgd"} | TERMS
    document["statistics"]["unit"] = "patient"
    plan = Plan.parse(to_bytes(document), subject="plan")
    images = torch.rand(NUM, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    engine = TrainingSettings(device="cpu", checkpoint_s=0.0).engine
    expert = PlannedExpert(plan, "north", 0, None, engine, stops=False, paid=paid(noise))
    return TrainingTask(expert, {"images": images, "units": unit_N}, "d" * 64)


def trial(folder: Path, secret: bytes = bytes(range(32)), **changes: object) -> SmallJob:
    """A run in a folder, whose secret a test knows."""
    run = SmallJob(folder, task=wanted(**changes))  # type: ignore[arg-type]
    run.folder.path.mkdir(parents=True)
    run.folder.secret.write_bytes(secret)
    return run


def private(secret: bytes = b"s" * 32, unit_N: Tensor = UNIT_N, **terms: object) -> PrivateTraining:
    noise_terms = DpSgd.model_validate(TERMS | terms)
    rate = noise_terms.rate(int(unit_N.max()) + 1)
    return PrivateTraining(noise_terms, PAID.model_copy(update={"rate": rate}), unit_N, secret)


def test_units_enter_a_step_by_chance_alone_each_with_the_rate() -> None:
    """The secret is fixed, so in no run or in all; the bounds are those of a chance of one in a million."""
    source = private()
    num_steps = 4000
    entered = np.stack(
        [np.bincount(source.sampled(step), minlength=14) for step in range(num_steps)]
    )
    assert entered.max() == 1
    rate = 4 / 14
    mean = entered.mean(0)
    assert np.abs(mean - rate).max() < 5.5 * np.sqrt(rate * (1 - rate) / num_steps)
    sizes = entered.sum(1)
    assert sizes.var() == pytest.approx(14 * rate * (1 - rate), rel=0.15), (
        "the number of units varies, as Poisson's does"
    )
    assert np.abs(np.corrcoef(entered.T) - np.eye(14)).max() < 0.1
    assert not np.array_equal(
        entered[:50], [np.bincount(private(b"t" * 32).sampled(n), minlength=14) for n in range(50)]
    )
    assert private(units_per_step=99).sampled(0).tolist() == list(range(14))


def test_noise_has_the_standard_deviation_that_was_paid_for_and_covers_the_rounding() -> None:
    num = 300_000
    std = 3.0 * sensitivity(1000)
    blocks = list(noise_of(num, std, SeededNoise(1)))
    assert [start for start, _ in blocks] == [0]
    noise = blocks[0][1].double()
    assert len(noise) == num
    assert float(noise.std()) == pytest.approx(3.0 * STEPS_PER_CLIP, rel=0.01)
    assert abs(float(noise.mean())) < 5 * std / num**0.5


def test_no_clipping_norm_lets_a_unit_exceed_its_sensitivity() -> None:
    """A base can be made on which one image alone has a tiny gradient: scaled to infinity, it would show through."""
    largest = sensitivity(3)
    for clip in (DpSgd.model_fields["clip"].metadata[0].ge, 1.0, 1e6):
        terms = DpSgd(**TERMS | {"clip": clip})
        for size in (1e-45, 1e-38, 1e-9, 1.0, 1e30):
            gradient = {"weight": torch.tensor([size, 0.0, -size])}
            grid = clipped(gradient, terms.clip)["weight"].double()
            with case(clip=clip, size=size):
                assert float(grid.norm()) <= largest
                # What is shorter than the clipping norm is scaled by 2^24 / clip alone.
                if 2**0.5 * size < clip:
                    exact = gradient["weight"].double() * STEPS_PER_CLIP / clip
                    assert (grid - exact).abs().max() <= 0.5 + 1e-6 * float(exact.abs().max())
    with pytest.raises(ValidationError, match="clip"):
        DpSgd(**TERMS | {"clip": 1e-35})


def test_units_must_be_numbered_without_a_gap_and_one_for_each_image(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=has_subject("privacy units")):
        private(unit_N=torch.tensor([0, 2]))
    with pytest.raises(DataError, match="one unit for each of 40 images"):
        trial(tmp_path, unit_N=UNIT_N[:-1])()


def test_machine_that_cannot_tell_units_apart_is_told_which_setting_to_change(
    tmp_path: Path,
) -> None:
    for name in ("compile", "recompute", "shard"):
        run = trial(tmp_path / name)
        engine = run.task.expert.engine.model_copy(update={name: True})
        expert = PlannedExpert(run.task.expert.plan, "north", 0, None, engine, paid=PAID)
        with case(name), pytest.raises(SetupError, check=has_subject(f"training.{name}")):
            expert.train(
                run.task.inputs,
                run.expert,
                run.folder.checkpoints,
                print,
                lambda: False,
                secret=run.folder.secret,
            )


def test_unit_that_needs_more_memory_than_a_gpu_has_is_refused_with_what_divides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("ddm.training.private.unit_gradient", full)
    with pytest.raises(SetupError, check=has_subject("memory of the GPU")) as refused:
        trial(tmp_path)()
    # These divide a batch or recompute its layers; private training refuses them or has no use for them.
    for setting in ("accumulate", "recompute", "shard"):
        assert setting not in refused.value.remedy
    for term in ("images_per_unit", "draws"):
        assert term in refused.value.remedy and term in DpSgd.model_fields


def test_plan_that_trains_privately_is_never_trained_without_its_noise(tmp_path: Path) -> None:
    run = trial(tmp_path)
    expert = PlannedExpert(run.task.expert.plan, "north", 0, None, run.task.expert.engine)
    with pytest.raises(SetupError, check=has_subject("private training")):
        expert.train(run.task.inputs, run.expert, run.folder.checkpoints, print, lambda: False)


def test_expert_is_a_function_of_secret_images_and_noise_multiplier(tmp_path: Path) -> None:
    runs = {
        "one": trial(tmp_path / "one", num_steps=5),
        "again": trial(tmp_path / "again", num_steps=5),
        "other": trial(tmp_path / "other", secret=bytes(32), num_steps=5),
        "quiet": trial(tmp_path / "quiet", noise=0.001, num_steps=5),
    }
    for run in runs.values():
        run()
    experts = {name: run.expert.read_bytes() for name, run in runs.items()}
    assert experts["one"] == experts["again"]
    assert len(set(experts.values())) == 3


def test_secret_is_made_for_its_owner_alone_where_there_is_none(tmp_path: Path) -> None:
    run = SmallJob(tmp_path, task=wanted())
    run()
    assert stat.S_IMODE(run.folder.secret.stat().st_mode) == 0o600
    assert run.folder.secret.read_bytes() not in run.expert.read_bytes()


def test_checkpoint_of_another_secret_is_not_gone_on_with(tmp_path: Path) -> None:
    run = trial(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(lambda progress: run.stop.set())
    run.stop.clear()
    run.folder.secret.write_bytes(bytes(32))
    with pytest.raises(SetupError, check=has_subject("checkpoints in checkpoints")):
        run()


def test_training_that_was_killed_ends_in_the_same_bytes_with_no_second_draw(
    tmp_path: Path,
) -> None:
    whole = trial(tmp_path / "whole")
    killed = trial(tmp_path / "killed")
    whole()
    reader, writer = os.pipe()

    def train_until_killed() -> None:
        def wait(progress: object) -> None:
            if killed.progress[-1].step == 20:
                os.write(writer, b"now")
                signal.pause()

        killed(wait)

    pid = fork_process(train_until_killed)
    os.close(writer)
    with os.fdopen(reader, "rb") as message:
        assert message.read(3) == b"now"
    os.kill(pid, signal.SIGKILL)
    assert wait_for_exit(pid) == -signal.SIGKILL
    secret = killed.folder.secret.read_bytes()
    killed()
    assert killed.progress[0].step > 15, "it went on from a checkpoint"
    assert killed.expert.read_bytes() == whole.expert.read_bytes()
    assert killed.folder.secret.read_bytes() == secret


@pytest.mark.slow
def test_two_processes_share_the_units_and_add_the_noise_once(tmp_path: Path) -> None:
    """The sum of the grid is exact, so only the gradients' own rounding differs; noise added twice would show."""
    from safetensors.torch import load_file

    alone = trial(tmp_path / "alone")
    together = trial(tmp_path / "together")
    together.settings = TrainingSettings(device="cpu", processes=2)
    noisier = trial(tmp_path / "noisier", noise=PAID.noise_multiplier * 2**0.5)
    for run in (alone, together, noisier):
        run()
    one, two, more = (load_file(run.expert) for run in (alone, together, noisier))
    apart = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert (
        apart < 1e-4 < 0.01 * max(float((one[name] - more[name]).abs().max()) for name in one) * 100
    )


def test_what_a_unit_goes_through_depends_on_no_other_unit() -> None:
    """Replacing a patient by one of other images, and of another number of them, changes no other patient's draws."""
    plan = wanted().expert.plan
    drawn: list[list[UnitSamples]] = []
    # the first patient has 3 images, or 1
    for unit_N in (
        UNIT_N,
        torch.cat([torch.tensor([0]), UNIT_N[3:]]),
    ):
        images = torch.rand(NUM, *SHAPE, generator=torch.Generator().manual_seed(0))[-len(unit_N) :]
        model = build_expert(plan.expert.architecture, SHAPE, seed=0)
        state = TrainingState(
            model, plan.expert.training, training_process(Engine(device="cpu")), 1
        )
        source = private(unit_N=unit_N, units_per_step=14)
        drawn.append(PrivateSteps(state, source, Examples(images), TrainingObjective()).draw(3))
    assert [len(batch) for batch in drawn] == [14, 14]
    for one, other in zip(drawn[0][1:], drawn[1][1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.fields, other.fields, strict=True))


ONE_TOKEN = Dit(patch=8, hidden=64, depth=4, heads=4)


class Patients:
    """Private steps of an expert whose large weights amplify rounding: each step's sum of gradients, before noise.

    Args:
        monkeypatch: to decide who enters.
        lora: trains factors of rank 4, else all weights.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lora: bool) -> None:
        self.monkeypatch = monkeypatch
        self.lora = lora
        self.images = [
            torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(unit))
            for unit in range(9)
        ]

    def total(self, entering: list[int], **changed: Tensor) -> Tensor:
        """The sum of the clipped gradients of the units that enter; all units have an image but those changed."""
        images = [changed.get(f"unit{unit}", own[:1]) for unit, own in enumerate(self.images)]
        unit_N = torch.cat([torch.full((len(own),), unit) for unit, own in enumerate(images)])
        random = torch.Generator().manual_seed(1)
        model = adapt(
            build_expert(ONE_TOKEN, (1, 8, 8), seed=0), LoraAdaptation(rank=4, alpha=4.0), seed=1
        )
        if not self.lora:
            model = adapt(build_expert(ONE_TOKEN, (1, 8, 8), seed=0), FullAdaptation(), seed=1)
        for weight in model.parameters():
            # ten times that of a start
            spread = 10 / (3 * weight[0].numel()) ** 0.5 if weight.dim() > 1 else 0.1
            weight.data = torch.randn(weight.shape, generator=random) * spread
        state = TrainingState(model, training(), training_process(Engine(device="cpu")), 1)
        source = private(unit_N=unit_N)
        sums = []

        def seen(*arguments: object) -> dict[str, Tensor]:
            gradient = clipped(*arguments)  # type: ignore[arg-type]
            sums.append(torch.cat([part.double().flatten() for part in gradient.values()]))
            return gradient

        self.monkeypatch.setattr("ddm.training.private.clipped", seen)
        self.monkeypatch.setattr(PrivateTraining, "sampled", lambda *_: np.array(entering))
        steps = PrivateSteps(state, source, Examples(torch.cat(images)), TrainingObjective())
        steps.advance(steps.draw(0))
        return torch.stack(sums).sum(0)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_replaced_added_or_removed_unit_moves_the_sum_of_the_others_by_nothing_at_all(
    monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """To the bit, where weights amplify rounding: the noise is for one unit's gradient, not for the others' as well."""
    patients = Patients(monkeypatch, lora=lora)
    everyone = list(range(9))
    alone = torch.stack([patients.total([unit]) for unit in everyone])
    assert (alone.norm(dim=1) > 0.9 * STEPS_PER_CLIP).all(), "all are clipped"
    for own in (0, 4):
        others = patients.total([unit for unit in everyone if unit != own])
        assert torch.equal(others, alone.sum(0) - alone[own])
        first = patients.images[own][:1]
        longer = patients.images[own][:2]
        for name, changed in {
            "one": first,
            "two": longer,
            "other": -3 * first,
            "lost": torch.nan * longer,
        }.items():
            changes = {f"unit{own}": changed}
            with case(own, name):
                assert torch.equal(
                    patients.total(everyone, **changes) - patients.total([own], **changes), others
                )


def test_process_that_computes_a_unit_does_not_depend_on_who_else_enters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes may have different devices, whose rounding differs."""
    plan = wanted().expert.plan
    state = TrainingState(
        build_expert(plan.expert.architecture, SHAPE, seed=0),
        plan.expert.training,
        training_process(Engine()),
        1,
    )
    images = Examples(torch.rand(NUM, *SHAPE))
    drawn = {}
    for entering in ([1, 2, 5, 9], [1, 5, 9], [0, 1, 2, 5, 9]):
        monkeypatch.setattr(
            PrivateTraining, "sampled", lambda *_, entering=entering: np.array(entering)
        )
        for rank in range(3):
            state.process = Ranked(rank)  # type: ignore[assignment]
            steps = PrivateSteps(state, private(), images, TrainingObjective())
            for unit in steps.draw(0):
                drawn.setdefault(unit.eps.numpy().tobytes(), set()).add(rank)
    assert len(drawn) == 5
    assert all(len(ranks) == 1 for ranks in drawn.values())


class Ranked:
    """One of three processes."""

    num_processes = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank
