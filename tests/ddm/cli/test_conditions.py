"""Figures and students of a release of islands whose experts are told a class, through the commands."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddm.cli.evaluated_conditions import ReferenceConditionOptions, conditions_for
from ddm.cli.options import ConditionOptions, check_null
from ddm.cli.sampling import ComputeSettings, ReleaseSource, SamplingJob, draw_together
from ddm.distillation.student import load_student
from ddm.errors import DataError, SetupError
from ddm.evaluation.reference import Reference, open_reference
from ddm.islands.folder import Islands
from ddm.loading.release import Release, open_release
from ddm.models.arithmetic import Arithmetic
from ddm.protocol.architecture import ClassCondition, NoCondition, TextCondition
from ddm.protocol.data import DataSpec
from ddm.sampling.strategies import strategy_named
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.errors import has_subject
from tests.support.islands import RECIPE, Owner, digits

NUM = 24
CLASSES = ClassCondition(num_classes=10)
LEARNED = 'kind = "learned"\nhidden = 16\ndepth = 1\nnum_steps = 40\n'


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    """Two islands by clusters, whose experts are told the digit; and reference images beside them."""
    recipe = RECIPE.replace(LEARNED, 'kind = "counts"\n')
    made = Owner.make(tmp_path_factory.mktemp("owner"), steps=5, recipe=recipe, extra=classes())
    for result in (made.split(), made.train(), made.assemble("release")):
        assert result.code == 0, result.err
    images, label_N = digits()
    np.savez(made.path / "real.npz", images=images[:60], labels=label_N[:60])
    np.savez(made.path / "bare.npz", images=images[:60])
    return made


def classes(drop: float = 0.1) -> str:
    return f'[condition]\nkind = "class"\nnum_classes = 10\ndrop = {drop}\n'


def shares_KC(owner: Owner) -> np.ndarray:
    """Each island's share of each class, counted from the data themselves."""
    label_N = digits()[1]
    islands = Islands(owner.run)
    rows = [np.load(islands.island(number).rows) for number in range(2)]
    counts_KC = np.array([np.bincount(label_N[part], minlength=10) for part in rows])
    return np.asarray(counts_KC / counts_KC.sum(0))


def real(path: Path) -> Reference:
    return open_reference(path, DataSpec(shape=(1, 8, 8), range=(-1.0, 1.0)))


def evaluated(owner: Owner, reference: str, *words: object) -> dict[str, Any]:
    known = (
        "--reference",
        owner.path / f"{reference}.npz",
        "--steps",
        2,
        "--neighbours",
        3,
        "--json",
    )
    result = owner.read("evaluate", "release", *known, *words)
    assert result.code == 0, result.err
    report: dict[str, Any] = json.loads(result.out)
    return report


def due(report: dict[str, Any]) -> list[float]:
    return [figures["prior"] for figures in report["per_silo"].values()]


def test_classes_are_as_frequent_as_in_the_reference_and_each_island_is_due_its_share_of_them(
    owner: Owner,
) -> None:
    report = evaluated(owner, "real", "--num", 120)
    assert report["sampling"]["conditions"] == "each under the class of a reference image"
    label_N = digits()[1][:60]
    assert due(report) == pytest.approx(shares_KC(owner)[:, label_N].mean(1), abs=1e-6)
    equal = evaluated(owner, "real", "--num", 20, "--class", "equal")
    assert due(equal) == pytest.approx(shares_KC(owner).mean(1), abs=1e-6)
    told_nothing = evaluated(owner, "bare", "--num", 20)
    assert told_nothing["sampling"]["conditions"] == "without a class"
    assert due(told_nothing) == pytest.approx(
        [island.num_images / 600 for island in Islands(owner.run).split.islands]
    )


def test_one_class_is_compared_with_its_own_reference_images_on_what_ddm_sample_draws(
    owner: Owner,
) -> None:
    condition = ("--class", 3, "--guidance", 1.5)
    out = owner.path / "threes-drawn.npz"
    _, label_N = digits()
    np.savez(owner.path / "all.npz", images=digits()[0], labels=label_N)
    report = evaluated(owner, "all", "--num", NUM, *condition)
    assert report["num_reference"] == report["reference"]["num"] == int((label_N == 3).sum())
    assert due(report) == pytest.approx(shares_KC(owner)[:, 3], abs=1e-6)
    assert report["sampling"]["guidance"] == 1.5
    drawn = owner.read("sample", "release", "--num", NUM, "--steps", 2, *condition, "--out", out)
    assert drawn.code == 0, drawn.err
    np.savez(owner.path / "only.npz", images=digits()[0][label_N == 3])
    again = evaluated(owner, "only", "--samples", out)
    for name, value in again["metrics"].items():
        assert report["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    np.savez(
        owner.path / "threes.npz", images=digits()[0][label_N == 3], labels=label_N[label_N == 3]
    )
    mixed, own = (
        evaluated(owner, "all", "--num", NUM, *condition, "--holdout", owner.path / name)
        for name in ("all.npz", "threes.npz")
    )
    assert mixed["holdout"]["num"] == own["holdout"]["num"] == int((label_N == 3).sum())
    assert mixed["metrics"] == own["metrics"] and mixed["copies"] == own["copies"]
    bare = (
        "--reference",
        owner.path / "all.npz",
        "--num",
        NUM,
        "--class",
        3,
        "--holdout",
        owner.path / "bare.npz",
    )
    assert "--holdout" in owner.read("evaluate", "release", *bare).err
    other = evaluated(owner, "all", "--num", NUM, "--class", 4)
    assert other["metrics"]["kid"] != pytest.approx(report["metrics"]["kid"], rel=1e-3)


def test_order_of_conditions_takes_every_image_in_turn(tmp_path: Path) -> None:
    label_M = np.array([0, 0, 0, 0, 7, 7, 2])
    np.savez(tmp_path / "real.npz", images=np.zeros((7, 1, 8, 8), np.float32), labels=label_M)

    def told(num: int, seed: int, label: str | None = None) -> torch.Tensor:
        options = ReferenceConditionOptions(label, None, None)
        label_N = conditions_for(
            options, CLASSES, real(tmp_path / "real.npz"), num, seed, counted=True
        ).value
        assert isinstance(label_N, torch.Tensor)
        return label_N

    assert sorted(told(7, 0).tolist()) == sorted(label_M.tolist())
    assert (
        torch.bincount(told(14, 0), minlength=10).tolist()
        == (2 * np.bincount(label_M, minlength=10)).tolist()
    )
    assert torch.equal(told(70, 5), told(70, 5))
    assert not torch.equal(told(70, 5), told(70, 6))
    assert torch.bincount(told(30, 0, "equal")).tolist() == [3] * 10
    uncounted = conditions_for(
        ReferenceConditionOptions(None, None, None),
        CLASSES,
        real(tmp_path / "real.npz"),
        7,
        0,
        counted=False,
    )
    assert uncounted.value is None  # whose expert a class belongs to is not known


def test_condition_that_does_not_fit_is_refused_with_what_does(tmp_path: Path) -> None:
    images = np.zeros((9, 1, 8, 8), np.float32)
    text = TextCondition(dim=3, max_tokens=2)
    np.savez(tmp_path / "bare.npz", images=images)
    np.savez(tmp_path / "wide.npz", images=images, labels=np.full(9, 10))
    np.savez(tmp_path / "named.npz", images=images, labels=np.array(["cat"] * 9))
    np.savez(tmp_path / "few.npz", images=images, labels=np.arange(9))
    undropped = ClassCondition(num_classes=10, drop=0.0)
    folder = tmp_path / "encoder"
    for options, condition, reference, kind, said in [
        (("data", None, None), CLASSES, "bare", SetupError, "--class data"),
        (("11", None, None), CLASSES, "bare", SetupError, "0 to 9"),
        (("red", None, None), CLASSES, "bare", SetupError, "data, equal, none, or a class, 0 to 9"),
        (("none", None, None), undropped, "bare", SetupError, "drop = 0"),
        ((None, None, None), CLASSES, "wide", DataError, "0 to 9"),
        ((None, None, None), CLASSES, "named", DataError, "--class equal"),
        (("3", None, None), CLASSES, "few", DataError, "8 images of class 3"),
        ((None, "a cat", folder), CLASSES, "bare", SetupError, "experts with classes"),
        (("equal", None, None), text, "bare", SetupError, "experts with texts"),
        ((None, None, folder), text, "bare", SetupError, "captions"),
        (("3", None, None), NoCondition(), "bare", SetupError, "Leave --class out"),
    ]:
        with case(options=options, reference=reference), pytest.raises(kind) as caught:
            conditions_for(
                ReferenceConditionOptions(*options),
                condition,
                real(tmp_path / f"{reference}.npz"),
                8,
                0,
                counted=True,
            )
        assert said in f"{caught.value} {caught.value.remedy}"
    for words in (("3", "a cat", folder), (None, "a cat", None), (None, " ", folder)):
        with case(words=words), pytest.raises(SetupError):
            ReferenceConditionOptions(*words)
    conditions = conditions_for(
        ReferenceConditionOptions(None, None, None),
        undropped,
        real(tmp_path / "bare.npz"),
        10,
        0,
        counted=True,
    )
    assert (
        conditions.words == "all 10 classes equally often"
    )  # experts that never learned to do without


def test_experts_that_were_always_told_a_class_are_not_asked_without_one() -> None:
    undropped = ClassCondition(num_classes=10, drop=0.0)
    for options, subject in (
        (ConditionOptions(), "condition"),
        (ConditionOptions("3", guidance=2.0), "--guidance"),
    ):
        with case(options=options), pytest.raises(SetupError, match="drop = 0") as refused:
            options.value(undropped)
        assert refused.value.subject == subject
        options.value(CLASSES)
    assert (
        ConditionOptions("3").value(undropped)
        == ConditionOptions("3", guidance=2.0).value(CLASSES)
        == 3
    )
    with pytest.raises(SetupError, check=has_subject("--unconditional")):
        check_null(undropped, "--unconditional", "")
    check_null(NoCondition(), "--unconditional", "")


def test_wrong_options_are_refused_before_anything_is_drawn(owner: Owner) -> None:
    drawn = ("--num", NUM, "--steps", 1)
    for words, said in [
        ((*drawn, "--class", "red"), "data, equal, none, or a class"),
        ((*drawn, "--class", "none", "--guidance", 2), "--guidance"),
        ((*drawn, "--class", "none", "--set", "class-prior=equal"), "--set class-prior"),
        ((*drawn, "--set", "guidance-interval=0.2,0.8"), "--set guidance-interval"),
        ((*drawn, "--set", "corrections=3"), "corrections"),
        (("--samples", owner.path / "real.npz", "--class", 3), "either --class or --samples"),
        (("--samples", owner.path / "real.npz", "--guidance", 3), "either --guidance or --samples"),
    ]:
        with case(words=words):
            result = owner.read(
                "evaluate", "release", "--reference", owner.path / "real.npz", *words
            )
            assert result.code == SetupError.exit_code and said in result.err, result.err


def opened(owner: Owner) -> Release:
    return open_release(owner.path / "release", root=owner.root, state=None, experts_later=True)


def test_processes_share_samples_with_classes_of_their_own(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process's part is run here; with one sample at a time not a byte may differ."""

    def in_turn(work: SamplingJob, num: int, *, on_report: Any, **_: Any) -> None:
        for rank in range(num):
            work(rank, num, on_report)

    monkeypatch.setattr("ddm.cli.sampling.run_parts", in_turn)
    release = opened(owner)
    source = ReleaseSource(
        release.plan,
        release.manifest,
        release.folder,
        None,
        ComputeSettings("cpu", Arithmetic(), 1),
    )
    told_N = torch.arange(11) % 10
    how = {"steps": 2, "condition": told_N, "condition_prior": None, "guidance": 0.5}
    job = SamplingJob(source, strategy_named("lock"), 0, how)

    def ignore_progress(num_done: int, total: int) -> None:
        """The command would draw a bar."""

    one = job.draw(source.ensemble(), range(11), ignore_progress)
    weight_NK = torch.from_numpy(shares_KC(owner).T)[told_N]
    drawn = draw_together(job, 11, 3, weight_NK, ignore_progress)
    assert torch.equal(drawn.images, one.images) and torch.equal(drawn.expert_N, one.expert_N)


def test_islands_are_distilled_into_a_student_that_is_told_the_class(
    owner: Owner, tmp_path: Path
) -> None:
    out = tmp_path / "student.safetensors"
    result = owner.read("distill", "release", "--num", 30, "--steps", 3, "--out", out)
    assert result.code == 0, result.err
    record, student = load_student(out)
    assert (record.condition, record.teacher) == (opened(owner).plan.condition, "label")
    expected = student.sample(5, steps=2, condition=3, guidance=1.0).images.clamp(-1, 1).numpy()
    for words, tolerance in (
        ((), 0.0),
        (("--set", "batch=2"), 1e-5),
        (("--dtype", "bfloat16"), 0.2),
    ):
        drawn = tmp_path / "drawn.npz"
        how = ("--num", 5, "--steps", 2, "--class", 3, "--guidance", 1, "--device", "cpu")
        sampled = run_command("ddm", "sample-student", out, *how, *words, "--out", drawn)
        assert sampled.code == 0, sampled.err
        with np.load(drawn) as file:
            assert str(file["release"]) == record.source.manifest
            np.testing.assert_allclose(file["images"], expected, atol=tolerance, rtol=0)
            assert ("--dtype" in words) <= (not np.array_equal(file["images"], expected))
    options = (
        "--data",
        owner.path / "real.npz",
        "--steps",
        3,
        "--teacher",
        "label",
        "--out",
        tmp_path / "of.safetensors",
    )
    by_label = owner.read("distill", "release", *options)
    assert by_label.code == 0, by_label.err
    assert load_student(tmp_path / "of.safetensors")[0].images.num == 60


@pytest.mark.slow
def test_two_real_processes_draw_a_students_samples(owner: Owner, tmp_path: Path) -> None:
    out = tmp_path / "student.safetensors"
    assert owner.read("distill", "release", "--num", 12, "--steps", 2, "--out", out).code == 0
    images_by_run = []
    for processes in (1, 2):
        how = ("--num", 5, "--steps", 2, "--class", 3, "--set", "batch=1", "--processes", processes)
        result = run_command(
            "ddm", "sample-student", out, *how, "--device", "cpu", "--out", tmp_path / "drawn.npz"
        )
        assert result.code == 0, result.err
        images_by_run.append(np.load(tmp_path / "drawn.npz")["images"])
    np.testing.assert_allclose(images_by_run[0], images_by_run[1], atol=1e-5, rtol=0)
