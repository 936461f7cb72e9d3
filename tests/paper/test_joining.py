"""Table 11: who trains on which images, which rate they take, and how often weights travel."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from aggregator.planning.released_base import velocity_loss
from ddm.diffusion.path import LinearPath
from ddm.ensemble import Ensemble
from ddm.errors import DataError, SetupError
from ddm.models import build_expert
from examples.paper.bases import squares_of_photographs
from examples.paper.tables.averaging import averaged
from examples.paper.tables.clock import Clock
from examples.paper.tables.contents import tables
from examples.paper.tables.data import Part, World, read_world
from examples.paper.tables.drawing import merged as averaged_weights
from examples.paper.tables.joining import (
    FEWER_CLASSES,
    JOINING,
    PUBLIC,
    RANDOM,
    SEEDED,
    averaging,
    ensemble,
    joining,
    pooled,
)
from examples.paper.tables.joining import LARGEST as FROM_LARGEST
from examples.paper.tables.judging import Judge, Judged
from examples.paper.tables.lab import Lab, num_messages
from examples.paper.tables.models import Made, Workshop, images_of, weights_of
from examples.paper.tables.presets import preset_for
from examples.paper.tables.rates import kind_of, tuned_as
from examples.paper.tables.results import Cell, Figure, over_seeds
from examples.paper.tables.rows import Row
from examples.paper.tables.sources import (
    PUBLIC_BASE,
    Experts,
    Federated,
    FirstRound,
    Monolith,
    PublicImages,
    SiloImages,
)
from examples.paper.tables.targets import TableTarget, targets
from tests.support.pretend_gpu import GPU, pretend_gpu

PRESET = preset_for("cpu", (1, 28, 28))
SILOS = Experts(num=8, partition="silos")
LARGEST = Monolith(images=SiloImages(num=8, silo="largest"))


@pytest.fixture(scope="module")
def world() -> World:
    return read_world("digits", None)


@pytest.mark.parametrize("concentration", [0.5, 0.1])
def test_test_images_of_a_silo_have_its_mix_of_classes(world: World, concentration: float) -> None:
    num = 4
    train_N = world.silos(num, 3, concentration)
    test_M = world.silos_of_test_images(num, 3, concentration)
    for label in range(10):
        of_train = train_N[world.train.label_N == label].bincount(minlength=num).double()
        of_test = test_M[world.test.label_N == label].bincount(minlength=num).double()
        difference = of_train / of_train.sum() - of_test / of_test.sum()
        # Four standard deviations of the difference of two shares of .5, the largest there are.
        limit = 4 * 0.5 * (1 / of_train.sum() + 1 / of_test.sum()).sqrt()
        assert float(difference.abs().max()) < float(limit)


def test_public_base_learns_no_image_of_another_class_or_of_a_silo(world: World) -> None:
    part = images_of(world, PublicImages(classes=(1, 7, 8)), seed=0)
    assert set(part.label_N.tolist()) == {1, 7, 8}
    assert len(part) == int(torch.isin(world.public.label_N, torch.tensor([1, 7, 8])).sum())
    with pytest.raises(SetupError) as caught:
        images_of(world, PublicImages(classes=(11,)), seed=0)
    assert caught.value.subject == "the public base"


def test_base_from_within_learns_the_images_of_one_silo(world: World) -> None:
    sizes = world.silos(8, 0).bincount(minlength=8)
    for which, size in (("largest", sizes.max()), ("smallest", sizes.min())):
        images = SiloImages.model_validate({"num": 8, "silo": which})
        assert len(images_of(world, images, seed=0)) == int(size)


def test_models_that_start_alike_share_a_rate_which_is_chosen_from_the_public_base() -> None:
    halves = SILOS.model_copy(update={"budget": 0.5, "start": LARGEST})
    from_public = SILOS.model_copy(update={"start": PUBLIC_BASE, "concentration": 0.1})
    assert kind_of(halves, PRESET) == kind_of(from_public, PRESET) != kind_of(SILOS, PRESET)
    assert tuned_as(halves, PRESET) == tuned_as(from_public, PRESET)
    assert tuned_as(halves, PRESET).start == PUBLIC_BASE  # type: ignore[union-attr]
    # A silo with its whole budget trains as the pooled model does.
    whole = SILOS.model_copy(update={"whole": True})
    assert kind_of(whole, PRESET) == kind_of(Monolith(), PRESET)
    assert tuned_as(whole, PRESET) == tuned_as(Monolith(), PRESET)
    averaged = Federated(num=8, rounds=100, in_process=True)
    from_base = averaged.model_copy(update={"start": PUBLIC_BASE})
    assert len({kind_of(source, PRESET) for source in (averaged, from_base)}) == 2


def test_islands_from_a_seed_take_equal_operations_and_a_rate_of_their_own() -> None:
    (row,) = [row for row in joining(PRESET).rows if row.label == SEEDED]
    islands = row.source
    assert isinstance(islands, Experts) and isinstance(islands.start, Monolith)
    assert islands.budget + islands.start.budget == 1.0
    assert kind_of(islands, PRESET) == "islands, batch 2, from a seed"
    shorter = tuned_as(islands, PRESET)
    assert shorter == islands.model_copy(update={"budget": PRESET.tuning * islands.budget})


def test_base_travels_to_every_silo_and_one_from_within_comes_from_one() -> None:
    first_round = FirstRound(experts=SILOS)
    starts = {None: 8, PUBLIC_BASE: 16, LARGEST: 17, first_round: 24}
    for start, num in starts.items():
        assert num_messages(SILOS.model_copy(update={"start": start})) == num


def test_averaged_weights_are_the_mean_by_the_shares_of_the_images() -> None:
    one, three = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.nn.init.constant_(one.weight, 1.0)
    torch.nn.init.constant_(three.weight, 3.0)
    both = Ensemble([one, three], None, [0.25, 0.75], (2,))
    alone = averaged_weights(both)
    (weights,) = [weights_of(alone, number) for number in range(len(alone.experts))]
    assert torch.equal(weights["weight"], torch.full((2, 2), 2.5))
    assert torch.equal(one.weight, torch.ones(2, 2))


def test_silos_of_fewer_classes_are_left_out_where_some_would_have_no_image() -> None:
    two_classes = torch.arange(3000) % 2
    images = torch.zeros(3000, 1, 1, 1)
    world = World("two classes", *[Part(images, two_classes)] * 4)
    silo_N = world.silos(PRESET.num_islands, 0, FEWER_CLASSES)
    assert torch.bincount(silo_N, minlength=PRESET.num_islands).min() == 0

    table = joining(PRESET, world.num_classes)
    every = [row.label for row in joining(PRESET).rows]
    assert [row.label for row in table.rows] == [name for name in every if "0.1" not in name]
    assert "with 2 classes, some silos would have no image, or too few to train" in table.note
    assert joining(PRESET, 10) == joining(PRESET)


def test_all_models_of_the_table_have_their_own_folders() -> None:
    rows = joining(PRESET).rows
    assert len({row.label for row in rows}) == len(rows)
    # The best batch is chosen from the same source as one row of a fixed batch; averaged weights come from an ensemble.
    fixed = [row for row in rows if not row.best and not row.merged]
    sources = {row.source.model_dump_json() for row in fixed}
    assert len(sources) == len(fixed)
    assert all(row.source.model_dump_json() in sources for row in rows)


def measured_cell(seed: int, **figures: float) -> Cell:
    """A row's figures for one seed."""
    return Cell(
        seed=seed,
        cost=None,
        router="",
        num_samples=1,
        sampling_seconds=1.0,
        figures={name: Figure(value=value) for name, value in figures.items()},
        commit="c",
        hardware="h",
        utc="0",
    )


def test_targets_compare_the_rows_that_they_name() -> None:
    def cells(**figures: float) -> dict[int, Cell]:
        return {seed: measured_cell(seed, **figures) for seed in range(3)}

    measured = {
        pooled(RANDOM): cells(fid=12.0),
        ensemble(0.5, PUBLIC): cells(fid=12.6),
        ensemble(0.5, RANDOM, whole=True): cells(fid=7.0, alone_fid=77.0),
    }
    reached = {target.figure: target for target in targets({JOINING: measured})}

    def named(*words: str) -> TableTarget:
        (found,) = [reached[figure] for figure in reached if all(word in figure for word in words)]
        return found

    over_pooled = named("public base", "pooled training from random weights")
    assert over_pooled.value == pytest.approx(1.05) and over_pooled.met == "yes"
    over_alone = reached["FID of the ensemble over that of the mean silo alone, whole budgets"]
    assert over_alone.value == pytest.approx(1 / 11) and over_alone.met == "yes"
    assert named("FID", "100 rounds").value is None


@pytest.mark.parametrize(("sent", "met"), [(99.0, "yes"), (100.0, "no")])
def test_bytes_of_a_base_must_be_below_a_hundredth(sent: float, met: str) -> None:
    def sends(num_bytes: float) -> dict[int, Cell]:
        return {seed: measured_cell(seed, bytes=num_bytes, fid=1.0) for seed in range(3)}

    many_rounds = averaging(0.5, 100, PUBLIC)
    rows = {ensemble(0.5, PUBLIC): sends(sent), many_rounds: sends(10_000.0)}
    reached = targets({JOINING: rows})
    (target,) = [target for target in reached if "bytes" in target.figure and target.seeds]
    assert (target.target, target.met) == ("under 0.01", met)
    assert target.value == pytest.approx(sent / 10_000)


def test_public_base_learns_the_images_of_another_origin_where_a_file_names_them(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "others.npz"
    np.savez(path, images=np.full((5, 8, 8), 255, dtype=np.uint8), labels=np.zeros(5, dtype=int))
    other = world.with_base(path)
    part = images_of(other, PUBLIC_BASE.images, seed=0)
    assert len(part) == 5 and bool((part.images == 1.0).all())
    # What was measured with one base is not taken for another's.
    assert other.name.startswith("digits, base others (") and other.name != world.name
    np.savez(path, images=np.zeros((5, 9, 9), dtype=np.uint8), labels=np.zeros(5, dtype=int))
    with pytest.raises(DataError, match=r"images of shape \(1, 8, 8\)"):
        world.with_base(path)


def test_photographs_are_cut_into_different_squares() -> None:
    squares = squares_of_photographs(6)
    assert squares.shape == (6, 28, 28)
    assert len({square.tobytes() for square in squares}) == 6
    assert all(square.std() > 0 for square in squares)


def test_expert_on_a_gpu_is_compared_there_and_leaves_it_as_the_start_of_others() -> None:
    shape = (1, 8, 8)
    network = preset_for("smoke", shape).network
    expert = build_expert(network, shape, seed=3).eval()
    images = torch.rand(5, *shape)
    eps = torch.randn(5, *shape)
    expected = velocity_loss(expert, LinearPath(), images, eps)
    with pretend_gpu():
        there = expert.to("cuda")
        loss = velocity_loss(there, LinearPath(), images.to("cuda"), eps.to("cuda"))
        ensemble_of_one = Ensemble([there], None, [1.0], shape, device=GPU)
        weights = weights_of(ensemble_of_one, 0)
        assert all(weight.device.type == "cpu" for weight in weights.values())
        build_expert(network, shape, seed=4).load_state_dict(weights)
    assert loss == pytest.approx(expected)


def silo_lab(
    world: World, folder: Path, test_images_of_silos: list[int], min_reference: int = 256
) -> Lab:
    """A lab whose silos have this many test images, with a judge whose FIDs are the sizes of their references.

    The sum of all pixels is added.
    """
    silo_M = torch.repeat_interleave(
        torch.arange(len(test_images_of_silos)), torch.tensor(test_images_of_silos)
    )

    def fid(images: torch.Tensor, rows: torch.Tensor | None = None) -> Figure:
        size = 10_000 if rows is None else len(rows)
        return Figure(value=size + float(images.sum()))

    def silos_of_test_images(num: int, seed: int, concentration: float) -> torch.Tensor:
        return silo_M

    divided = SimpleNamespace(
        name="made", train=world.train, silos_of_test_images=silos_of_test_images
    )
    judged = Judged(digest="this run's", accuracy=0.0)
    judge = SimpleNamespace(about=judged, world=divided, min_reference=min_reference, fid=fid)
    return Lab(cast(World, divided), PRESET, folder, cast(Judge, judge), Clock())


def test_reference_of_a_fid_has_four_images_for_every_feature() -> None:
    of_64 = SimpleNamespace(test=SimpleNamespace(features_ND=torch.zeros(300, 64)))
    assert Judge.min_reference.fget(of_64) == 256  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("test_images", "own_fid", "smallest"),
    [
        ([256, 300, 500], 352.0, 256.0),
        # The smallest silo has too few test images, and so has no figure.
        ([255, 300, 500], 400.0, None),
        ([255, 100, 8], None, None),
    ],
)
def test_silos_of_few_test_images_have_no_fid_of_their_own(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    test_images: list[int],
    own_fid: float | None,
    smallest: float | None,
) -> None:
    monkeypatch.setattr(Lab, "_drawn", lambda *_: SimpleNamespace(images=torch.zeros(2, 1, 8, 8)))
    experts = [torch.nn.Identity() for _ in test_images]
    ensemble_of_silos = Ensemble(experts, None, [1 / 3] * 3, (1, 8, 8))
    own_K = [torch.arange(num) for num in (10, 20, 30)]
    made = cast(Made, SimpleNamespace(ensemble=ensemble_of_silos, own_K=own_K))
    source = Experts(num=3, partition="silos", whole=True)
    joint_images = torch.ones(1, 1, 1, 1)
    figures = silo_lab(world, tmp_path, test_images)._alone(source, made, joint_images, seed=0)
    assert figures.get("own_fid") == own_fid
    assert figures.get("joint_own_fid") == (None if own_fid is None else own_fid + 1)
    assert figures.get("smallest_own_fid") == smallest
    assert figures.get("smallest_joint_own_fid") == (None if smallest is None else smallest + 1)
    assert figures["own_silos"] == sum(num >= 256 for num in test_images)
    assert figures["alone_fid"] == 10_000.0


def kept(lab: Lab, row: Row, **figures: float) -> bool:
    """Keep a cell under a row's key; return whether it is then used for the row."""
    lab.kept.write(lab.key(row, 0), measured_cell(0, fid=1.0, **figures))
    return lab.found(row, 0) is not None


def test_cell_of_another_table_is_measured_again_where_it_lacks_this_ones_figures(
    world: World, tmp_path: Path
) -> None:
    lab = silo_lab(world, tmp_path, [300, 300])
    (first,) = [row for row in joining(PRESET).rows if row.label == ensemble(0.5, RANDOM)]
    (same,) = [row for row in tables(PRESET)[3].rows if row.source == first.source][:1]
    same = same.model_copy(update={"strategy": first.strategy})
    # Both are the same model, drawn from in the same way: what is measured for one serves the other.
    assert lab.key(first, 0) == lab.key(same, 0)
    assert not kept(lab, first)
    assert kept(lab, same)
    assert kept(lab, first, rounds=1.0, bytes=8.0)
    assert kept(lab, same, rounds=1.0, bytes=8.0)


def test_cell_from_before_small_silos_were_left_out_is_measured_again(
    world: World, tmp_path: Path
) -> None:
    row = Row(table=JOINING, label="whole", source=Experts(num=2, partition="silos", whole=True))
    before = {"rounds": 1.0, "own_fid": 9.0}
    assert kept(silo_lab(world, tmp_path / "large", [300, 300]), row, **before)
    small = silo_lab(world, tmp_path / "small", [300, 8])
    assert not kept(small, row, **before)
    assert kept(small, row, own_silos=1.0, **before)


def test_mean_of_fids_over_seeds_is_geometric_and_has_an_interval() -> None:
    # The logarithms are log(62.5) - log(1.25), log(62.5) and log(62.5) + log(1.25), so that their standard deviation
    # is log(1.25); Student's t with 2 degrees of freedom is 4.30265.
    values = (50.0, 62.5, 78.125)
    half = 4.30265 * math.log(1.25) / math.sqrt(3)
    for name in ("alone_fid", "own_fid", "smallest_own_fid"):
        cells = {seed: measured_cell(seed, **{name: value}) for seed, value in enumerate(values)}
        interval = over_seeds(cells, name)
        assert interval == pytest.approx((62.5, 62.5 * math.exp(-half), 62.5 * math.exp(half)))
        assert over_seeds({0: cells[0]}, name) == (50.0, None, None)


def test_target_without_a_silo_that_has_enough_test_images_is_not_measured() -> None:
    starts = {RANDOM: {"fid": 2.0, "alone_fid": 8.0}, FROM_LARGEST: {"fid": 1.0}}
    cells = {
        ensemble(0.5, start, whole=True): {0: measured_cell(0, **figures)}
        for start, figures in starts.items()
    }
    measured = {target.figure: target.value for target in targets({JOINING: cells})}
    alone = "FID of the ensemble over that of the mean silo alone, whole budgets"
    own = "FID of a silo's expert against its own images over that without a base, whole budgets"
    assert measured[alone] == 0.25
    assert measured[f"{own}, mean of the silos"] is None


def test_averaging_through_flower_has_the_silos_of_its_concentration(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("examples.paper.tables.averaging._run", stop)
    source = Federated(num=4, rounds=2, concentration=0.1)
    shop = Workshop(world, preset_for("smoke", world.data.shape), tmp_path, Clock())
    with pytest.raises(InterruptedError):
        averaged(shop, source, 0.1, seed=1, name="averaged")
    silo_N = world.silos(4, 1, 0.1)
    assert not torch.equal(silo_N, world.silos(4, 1))
    for silo in range(4):
        images = np.load(tmp_path / "averaged" / f"silo{silo}.npy")
        assert np.array_equal(images, world.train.images[silo_N == silo].numpy())


def test_averaging_through_flower_refuses_a_model_to_start_from(
    world: World, tmp_path: Path
) -> None:
    shop = Workshop(world, preset_for("smoke", world.data.shape), tmp_path, Clock())
    source = Federated(num=4, rounds=2, start=PUBLIC_BASE)
    with pytest.raises(SetupError, match="random weights in the first round"):
        averaged(shop, source, 0.1, seed=1, name="averaged")
