"""Labels of public images: targets and weights against Bayes' rule written out, frequencies against their law."""

import pytest
import torch

from ddm.errors import DataError, ShapeError
from ddm.partition.layout import ExpertPart, Layout
from ddm.protocol.partition import SiloClusterPartition
from ddm.routers.labelled import Labelled, class_shares, numbered, silo_shares
from tests.support.errors import has_subject
from tests.support.router_problems import clustered_layout, one_expert_per_silo, random_layout

SHARES = torch.tensor([[0.7, 0.2, 0.1, 0.0], [0.1, 0.1, 0.8, 0.0]], dtype=torch.float64)
CELLS = torch.tensor([0] * 20 + [1] * 10 + [2] * 30 + [3] * 5)


def labelled() -> Labelled:
    return Labelled.of_cells(torch.arange(65.0)[:, None], CELLS, SHARES, torch.arange(65))


def test_image_is_of_an_expert_with_the_probability_of_bayes_rule_under_equal_priors() -> None:
    images = labelled()
    assert images.images[:, 0].tolist() == list(range(60))  # nobody has data in the last cell
    assert images.condition_N is not None and images.condition_N.tolist() == list(range(60))
    for image in (0, 25, 59):
        share_E = SHARES[:, CELLS[image]]
        assert images.target_JE[images.cell_N[image]].tolist() == pytest.approx(
            (share_E / share_E.sum()).tolist()
        )
    expected = {0: (0.7 + 0.1) / 2 / 20, 1: (0.2 + 0.1) / 2 / 10, 2: (0.1 + 0.8) / 2 / 30}
    assert images.weight_N.tolist() == pytest.approx(
        [expected[int(cell)] for cell in images.cell_N]
    )
    assert float(images.weight_N.sum()) == pytest.approx(1)


def test_images_are_drawn_as_often_as_they_weigh_so_that_every_expert_has_an_equal_share() -> None:
    images = labelled()
    num = 40_000
    rows = images.draw(num, torch.Generator().manual_seed(0))
    for cell, share in enumerate((0.4, 0.15, 0.45)):
        actual = float((images.cell_N[rows] == cell).double().mean())
        assert abs(actual - share) < 5 * (share * (1 - share) / num) ** 0.5
    target_E = images.target_JE[images.cell_N[rows]].double().mean(0)
    assert float((target_E - 0.5).abs().max()) < 5 * 0.5 / num**0.5


def test_one_image_in_ten_of_each_cell_checks_the_training_and_no_image_does_both() -> None:
    images = labelled()
    train, check = images.divided(torch.Generator().manual_seed(0))
    assert sorted([*train.images[:, 0].tolist(), *check.images[:, 0].tolist()]) == list(range(60))
    assert torch.bincount(check.cell_N).tolist() == [2, 1, 3]
    for part in (train, check):
        assert part.condition_N is not None and torch.equal(
            part.condition_N, part.images[:, 0].long()
        )
        assert torch.equal(part.weight_N, images.weight_N[part.images[:, 0].long()])


def test_images_drawn_by_experts_are_labelled_by_them() -> None:
    drawn = torch.arange(6.0).view(3, 2, 1)
    images = Labelled.drawn(drawn, torch.arange(6).view(3, 2))
    assert torch.equal(images.target_JE[images.cell_N], torch.eye(3).repeat_interleave(2, 0))
    assert images.images.flatten().tolist() == images.condition_N.tolist() == list(range(6))  # type: ignore[union-attr]
    assert images.weight_N.tolist() == pytest.approx([1 / 6] * 6)


def test_experts_of_whom_no_image_is_are_refused() -> None:
    with pytest.raises(DataError, check=has_subject("labelled images")):
        Labelled.of_experts(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]), 3)
    with pytest.raises(ShapeError, check=has_subject("labels")):
        Labelled.of_experts(torch.zeros(4, 1), torch.tensor([0, 0, 1]), 2)
    single = Labelled.of_experts(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]), 2)
    with pytest.raises(ShapeError, check=has_subject("labelled images")):
        single.divided(torch.Generator())


def test_shares_of_classes_and_groups_are_those_of_the_counts_within_what_an_expert_covers() -> (
    None
):
    count_KCG = torch.randint(1, 50, (2, 3, 4), generator=torch.Generator().manual_seed(0)).double()
    for layout in (one_expert_per_silo(2), clustered_layout(), random_layout()):
        actual = class_shares(count_KCG, layout).view(-1, 3, 4)
        assert actual.sum((1, 2)).tolist() == pytest.approx([1] * len(layout.parts))
        for e, (k, part) in enumerate(zip(layout.silo_E, layout.parts, strict=True)):
            total = sum(float(count_KCG[k, c, g]) for c in range(3) for g in part.groups)
            for c in range(3):
                for g in range(4):
                    wanted = float(count_KCG[k, c, g]) / total if g in part.groups else 0.0
                    assert float(actual[e, c, g]) == pytest.approx(wanted)


def test_shares_of_silos_and_groups_are_those_of_the_images_that_are_said_to_be_of_a_silo() -> None:
    silo_N = torch.tensor([0, 0, 0, 1, 1])
    group_N = torch.tensor([0, 1, 3, 2, 2])
    actual = silo_shares(silo_N, group_N, 4, one_expert_per_silo(2)).view(2, 2, 4)
    assert actual[0].tolist() == [pytest.approx([1 / 3, 1 / 3, 0, 1 / 3]), [0, 0, 0, 0]]
    assert actual[1].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    parts = [
        [ExpertPart("a-0", 0, (0, 1)), ExpertPart("a-1", 1, (2, 3))],
        [ExpertPart("b", 0, (0, 1, 2, 3))],
    ]
    by_cluster = silo_shares(
        silo_N, group_N, 4, Layout.of(SiloClusterPartition(min_images=1), parts)
    ).view(3, 2, 4)
    assert by_cluster[:, 0].tolist() == [[0.5, 0.5, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    images = Labelled.of_cells(torch.zeros(5, 1), silo_N * 4 + group_N, by_cluster.flatten(1))
    assert images.target_JE[images.cell_N].argmax(1).tolist() == [0, 0, 1, 2, 2]
    in_two = silo_shares(
        silo_N, group_N, 4, random_layout()
    )  # nothing tells random parts of a silo apart
    images = Labelled.of_cells(torch.zeros(5, 1), silo_N * 4 + group_N, in_two)
    assert images.target_JE[images.cell_N[0]].tolist() == [0.5, 0.5, 0, 0]


def test_names_that_are_of_nobody_have_no_number() -> None:
    assert numbered(["north", "", "east", "south"], ["east", "north"]).tolist() == [1, -1, 0, -1]
