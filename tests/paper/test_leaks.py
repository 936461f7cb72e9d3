"""The table of what experts remember: who learns what, what is kept, and what is written."""

import csv
import re
import shutil
from pathlib import Path

import pytest
import torch

from ddm.errors import DataError, SetupError
from ddm.evaluation.classifier import train_classifier
from ddm.evaluation.intervals import Estimate
from examples.paper.leaks import __main__ as leaks
from examples.paper.leaks.cells import LEAKS, LeakCell, read_cells, write_cells
from examples.paper.leaks.choices import CHOICES, plan_of
from examples.paper.leaks.results import write_report
from examples.paper.leaks.site import Data, LeakWorkshop, Silo, Stopwatch
from examples.paper.leaks.targets import leak_targets
from examples.paper.tables.data import Part, World
from examples.paper.tables.results import Figure, Kept

SHAPE = (1, 8, 8)


def part(num: int, seed: int) -> Part:
    images = torch.randn((num, *SHAPE), generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)
    return Part(images, torch.arange(num) % 4)


@pytest.fixture(scope="module")
def world() -> World:
    return World("made", part(400, 0), part(300, 1), part(800, 2), part(200, 3))


def cell(
    choice: str,
    images: int,
    auc: float,
    *,
    seed: int = 0,
    fid: float = 1.0,
    verdict: str = "pass",
) -> LeakCell:
    figure = Figure(value=auc, low=auc - 0.05, high=auc + 0.05)
    figures = dict.fromkeys(("auc", "tpr", "copies", "kid"), figure)
    figures["fid"] = Figure(value=fid)
    return LeakCell(
        choice=choice,
        images=images,
        seed=seed,
        steps=CHOICES[choice].steps,
        verdict=verdict,
        figures=figures,
        noise_multiplier=None,
        training_s=1.0,
        audit_s=2.0,
        classifier="89ab",
        commit="0",
        hardware="made",
        utc="2026-01-01",
    )


def test_base_learns_public_images_and_nobody_learns_the_units_held_out(world: World) -> None:
    data = Data.of(world, (1, 2), (2, 3))
    assert (
        len(data.learned) == 200
        and len(data.held_out) == 300
        and len(data.public) == 150
        and len(data.test) == 100
    )
    is_public_NM = (data.public[:, None] == data.learned).flatten(2).all(2)
    assert not is_public_NM.any()
    silo = Silo(
        LeakWorkshop(data, world, Path("unused"), 1.0, Path("unused")), CHOICES["random"], 50
    )
    assert torch.equal(silo.cohort.images[:50], data.learned[:50]) and torch.equal(
        silo.cohort.images[50:], data.held_out
    )


def test_silo_of_every_seed_has_other_images_and_an_outsider_has_none_of_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.paper.leaks.site.MAX_IMAGES", 60)
    data = Data.of(world, (1, 2), (0, 3))
    learned = [data.learned_by(60, seed) for seed in range(3)]
    for seed, images in enumerate(learned):
        same = (data.others(seed)[:, None] == images).flatten(2).all(2)
        assert len(data.others(seed)) == 140 and not same.any()
    assert not (learned[0][:, None] == learned[1]).flatten(2).all(2).any()


def test_choices_name_the_base_where_they_start_from_one() -> None:
    bases = {name: plan_of(SHAPE, choice, 350).expert.base for name, choice in CHOICES.items()}
    assert {name for name, base in bases.items() if base is None} == {
        "random",
        "random-fifth",
        "random-tenth",
    }


def test_private_choices_are_paid_for_all_units_and_half_the_epsilon_takes_more_noise(
    world: World,
) -> None:
    data = Data.of(world, (1, 2), (0, 3))
    whole = LeakWorkshop(data, world, Path("unused"), 1.0, Path("unused"))
    plans = {name: plan_of(SHAPE, choice, 350) for name, choice in CHOICES.items()}
    private = {
        f"{way}-{epsilon}{steps}"
        for way in ("base", "lora")
        for epsilon in (8, 2)
        for steps in ("", "-tenth", "-all")
    }
    assert {name for name, plan in plans.items() if plan.expert.privacy} == private
    whole.__dict__["base"] = None
    paid = [Silo(whole, CHOICES[name], 50).expert.paid for name in ("lora-8", "lora-2")]
    assert paid[0] and paid[1] and paid[1].noise_multiplier > 2 * paid[0].noise_multiplier
    assert paid[0].rate == pytest.approx((350 // 4) / 350)


def test_targets_take_the_best_training_whose_audits_pass_with_every_seed() -> None:
    cells = [cell("random", 1000, 0.7, seed=seed, fid=50.0, verdict="fail") for seed in range(3)]
    cells += [cell("base", 1000, 0.6, seed=seed, fid=40.0) for seed in range(3)]
    cells[-1] = cells[-1].model_copy(update={"verdict": "fail"})
    cells += [cell("lora-fifth", 1000, 0.5, seed=seed, fid=60.0) for seed in range(3)]
    cells += [cell("lora-8", 1000, 0.5, seed=seed, fid=100.0) for seed in range(3)]
    cells += [cell("base-fifth", 300, 0.5, fid=1.0)]
    audited, private = leak_targets(cells)
    assert audited.value == pytest.approx(60 / 50) and audited.note == "lora-fifth"
    assert (audited.met, audited.seeds) == ("yes", 3)
    assert private.value == pytest.approx(100.0) and private.met == "yes"


def test_targets_say_when_no_training_passes_and_when_nothing_was_measured() -> None:
    failing = [cell("random", 1000, 0.7), cell("base", 1000, 0.9, verdict="fail")]
    assert leak_targets(failing)[0].met == "no"
    assert leak_targets([])[0].met == ""


def test_time_of_an_audit_goes_on_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("examples.paper.leaks.site.time.monotonic", lambda: now[0])
    path = tmp_path / "audit" / "elapsed.json"
    first = Stopwatch(path)
    now[0] += 40.0
    first.keep()
    # Killed 0.5 s later, which nobody wrote down; another process starts with a clock of its own.
    now[0] += 0.5
    first.keep()
    now[0] = 7.0
    second = Stopwatch(path)
    now[0] += 2.0
    assert second.elapsed_s == pytest.approx(42.0)


def test_page_and_figures_show_every_row_in_the_order_of_images(tmp_path: Path) -> None:
    estimate = {"fid": Estimate(9.0, 8.0, 10.0), "kid": Estimate(1.0, 0.5, 1.5)}
    attacked = cell("random", 100, 0.9)
    for name in ("outsider_auc", "outsider_tpr"):
        attacked.figures[name] = Figure(value=0.6949)
    write_report(
        tmp_path,
        "made",
        [cell("lora", 300, 0.6), attacked],
        estimate,
        0.5,
    )
    page = (tmp_path / "README.md").read_text("utf-8")
    assert (
        page.index("all weights, from random") < page.index("LoRA, from")
        and "--dataset made" in page
        and "0.5 of their steps" in page
    )
    assert "0.900 [0.850, 0.950]" in page
    # Rounded as the figures beside it, not cut off.
    assert "0.695" in page and "0.694" not in page
    with (tmp_path / "leaks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["choice"], float(row["auc"])) for row in rows] == [("random", 0.9), ("lora", 0.6)]
    assert rows[0]["classifier"] == "89ab"
    assert (tmp_path / "leaks.png").stat().st_size > 5000


def test_experts_that_another_version_kept_count_as_not_measured(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    expert, other = cell("base", 100, 0.5), cell("lora", 100, 0.5)
    kept.write(expert.key, expert)
    kept.write(other.key, other)
    path = kept.file(other.key)
    path.write_text(path.read_text("utf-8").replace('"verdict"', '"judgement"'))
    assert kept.all(LeakCell) == [expert] and kept.read(other.key, LeakCell) is None


def test_published_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    private = cell("base-8", 300, 0.625).model_copy(update={"noise_multiplier": 1.25})
    attacked = cell("random", 100, 0.9)
    attacked.figures["outsider_auc"] = Figure(value=0.75)
    unknown_judge = cell("lora", 100, 0.5).model_copy(update={"classifier": ""})
    written, again = tmp_path / LEAKS, tmp_path / "again.csv"
    write_cells(written, "made", [private, attacked, unknown_judge])
    read = read_cells(written, "made", "89ab", 1.0)
    write_cells(again, "made", read)
    assert again.read_bytes() == written.read_bytes()
    assert read[0].key == ("base-8", 300, 0) and read[0].noise_multiplier == 1.25
    assert read[1].figures["outsider_auc"] == Figure(value=0.75)
    assert "outsider_auc" not in read[0].figures and read[2].classifier == ""


@pytest.mark.parametrize(
    ("change", "dataset", "judge"),
    [
        ("", "made", "cdef"),
        ("", "other", "89ab"),
        ("base-8:nothing-like-it", "made", "89ab"),
        ("0.625:much", "made", "89ab"),
        ("classifier:judge", "made", "89ab"),
        ("2026-01-01:\xff", "made", "89ab"),
    ],
    ids=["classifier", "data set", "choice", "number", "columns", "encoding"],
)
def test_published_figures_of_something_else_are_refused(
    tmp_path: Path, change: str, dataset: str, judge: str
) -> None:
    path = tmp_path / LEAKS
    write_cells(path, "made", [cell("base-8", 300, 0.625)])
    if change:
        old, new = change.split(":")
        path.write_text(path.read_text("utf-8").replace(old, new), "latin-1")
    with pytest.raises(DataError):
        read_cells(path, dataset, judge, 1.0)


def test_published_figures_of_shorter_trainings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / LEAKS
    write_cells(path, "made", [cell("base-8", 300, 0.625)])
    with pytest.raises(DataError, match="0.1 of their steps"):
        read_cells(path, "made", "89ab", 0.1)


def test_classifier_of_other_images_does_not_judge(world: World, tmp_path: Path) -> None:
    path = tmp_path / "classifier.safetensors"
    other = world.validation
    train_classifier(other.images, other.label_N, world.data, num_steps=1).save(path)
    data = Data.of(world, (1, 2), (0, 3))
    workshop = LeakWorkshop(data, world, tmp_path, 1.0, path)
    with pytest.raises(SetupError, match="a classifier of the public images of made"):
        _ = workshop.classifier
    public = world.public
    train_classifier(public.images, public.label_N, world.data, num_steps=1).save(path)
    judge = workshop.classifier
    assert judge.encode(data.test[:3]).shape == (3, 64)


@pytest.mark.slow
def test_a_run_measures_each_expert_once_and_an_overfitted_one_is_found(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(leaks, "read_world", lambda name, path: world)
    words = [
        "leaks",
        "--dataset",
        "fashion-mnist",
        "--data",
        "x",
        "--out",
        str(tmp_path),
        "--images",
        "60",
    ]
    monkeypatch.setitem(leaks.PRIVATE_CLASSES, "fashion-mnist", (1, 2))
    monkeypatch.setitem(leaks.BASE_CLASSES, "fashion-mnist", (0, 3))
    monkeypatch.setattr("sys.argv", [*words, "--choices", "random", "lora-2", "--samples", "300"])
    assert leaks.main() == 0
    page = (tmp_path / "README.md").read_text("utf-8")
    whole, private = (
        float(number) for number in re.findall(r"(?:fail|pass|inconclusive) +(\d\.\d+)", page)
    )
    assert whole > 0.9 > 0.7 > private
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("work/*/cells*/*")}
    assert leaks.main() == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("work/*/cells*/*")}
    later = tmp_path / "later"
    work = later / "work/fashion-mnist-1"
    shutil.copytree(next(tmp_path.glob("work/*/base")), work / "base")
    continuing = ["--out", str(later), "--published", str(tmp_path)]
    judged = ["--classifier", str(next(tmp_path.glob("work/*/classifier.safetensors")))]
    monkeypatch.setattr(
        "sys.argv",
        [*words, *continuing, *judged, "--choices", "random", "lora-2", "--samples", "300"],
    )
    assert leaks.main() == 0
    assert not any(work.glob("cells*/*"))
    for name in (LEAKS, "README.md"):
        assert (later / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8")
