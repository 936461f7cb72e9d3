"""Copies among samples: those planted are found, fresh images of the same kind are not."""

import torch
from torch import Tensor

from ddm.audit.copies import NEIGHBOURS, CopyScale, duplicates, share_of_copies
from ddm.evaluation.neighbours import nearest, nearest_in_blocks


def normal(num: int, seed: int) -> Tensor:
    return torch.randn(num, 24, generator=torch.Generator().manual_seed(seed))


TRAINED = normal(500, 0)


def neighbours(rows: Tensor) -> Tensor:
    return nearest_in_blocks(rows, [(0, TRAINED)], NEIGHBOURS)[0]


def test_neighbours_found_block_by_block_are_those_of_brute_force() -> None:
    rows = normal(40, 1)
    blocks = [(start, TRAINED[start : start + 130]) for start in range(0, 500, 130)]
    apart, which = nearest_in_blocks(rows, blocks, 7)
    expected = torch.cdist(rows.double(), TRAINED.double()).square().topk(7, dim=1, largest=False)
    assert torch.allclose(apart, expected.values, rtol=1e-9) and torch.equal(
        which, expected.indices
    )
    first = nearest(rows, TRAINED)
    assert torch.equal(which[:, 0], first[1]) and torch.allclose(apart[:, 0], first[0])


def test_neighbours_of_fewer_others_than_asked_for_are_at_infinity() -> None:
    apart, which = nearest_in_blocks(normal(3, 1), [(0, TRAINED[:2])], 4)
    assert apart.isinf()[:, 2:].all() and (which[:, 2:] == -1).all() and (which[:, :2] >= 0).all()


def test_planted_copies_are_counted_and_fresh_samples_are_not() -> None:
    scale = CopyScale.of(neighbours(normal(300, 2)))
    samples = torch.cat([TRAINED[:30] + 0.1 * normal(30, 3), normal(970, 4)])
    is_copy = scale.near_copies(neighbours(samples))
    assert is_copy[:30].all() and is_copy[30:].sum() <= 3
    share = share_of_copies(scale, neighbours(samples))
    assert share.low <= 0.03 <= share.high


def test_floor_holds_where_held_out_images_are_copies_themselves_and_duplicates_are_told() -> None:
    held = torch.cat([TRAINED[:5], normal(295, 2)])
    assert duplicates(neighbours(held)).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert CopyScale.of(neighbours(held)).max_distance == 0.0
    assert (
        CopyScale.of(neighbours(held))
        .near_copies(neighbours(TRAINED[10:20] + 0.1 * normal(10, 5)))
        .all()
    )


def test_smooth_sample_between_many_training_images_is_no_copy_although_it_is_near() -> None:
    """The mean of all lies nearer to every image than any held-out one does, and to none in particular."""
    trained, held = (
        torch.randn(num, 96, generator=torch.Generator().manual_seed(num)) for num in (500, 300)
    )
    scale = CopyScale.of(nearest_in_blocks(held, [(0, trained)], NEIGHBOURS)[0])
    middle = nearest_in_blocks(torch.zeros(1, 96), [(0, trained)], NEIGHBOURS)[0]
    assert float(middle[0, 0].sqrt()) < scale.max_distance
    assert not scale.near_copies(middle).any()
