"""Positions of a larger image lie between those on which a network was trained; those of the same size are equal."""

import pytest
import torch

from ddm.models import build_expert, expected_tensors
from ddm.models.layers import sincos_positions
from ddm.protocol.architecture import Dit, Mmdit, TextCondition


def brute_force(rows: int, columns: int, hidden: int, grid: tuple[int, int]) -> torch.Tensor:
    """Each embedding by itself, in double precision."""
    quarter = hidden // 4
    frequency = [10_000.0 ** (-k / quarter) for k in range(quarter)]
    out = []
    for r in range(rows):
        for c in range(columns):
            places = (r * grid[0] / rows, c * grid[1] / columns)
            angles = [
                torch.tensor([place * f for f in frequency], dtype=torch.float64)
                for place in places
            ]
            out.append(torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())]))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("rows", "columns", "grid"), [(8, 8, (4, 4)), (6, 10, (4, 5)), (7, 3, (5, 2)), (3, 3, (4, 4))]
)
def test_positions_are_rescaled_to_the_range_that_was_trained(
    rows: int, columns: int, grid: tuple[int, int]
) -> None:
    positions = sincos_positions(rows, columns, 16, grid)
    torch.testing.assert_close(
        positions.double(), brute_force(rows, columns, 16, grid), rtol=0, atol=1e-5
    )
    unscaled = sincos_positions(rows, columns, 16)
    assert (positions - unscaled).abs().max() > 0.3  # the control: without a grid they are others


def test_positions_of_the_same_size_are_equal_to_the_bit() -> None:
    assert torch.equal(sincos_positions(5, 7, 24, (5, 7)), sincos_positions(5, 7, 24))
    for architecture in (
        Dit(patch=2, hidden=16, depth=1, heads=2),
        Mmdit(patch=2, hidden=16, depth=1, heads=2),
    ):
        condition = TextCondition(dim=4, max_tokens=3)
        gridded = architecture.model_copy(update={"position_grid": (4, 4)})
        one, other = (
            build_expert(variant, (1, 8, 8), condition=condition)
            for variant in (architecture, gridded)
        )
        assert torch.equal(one.position_ND, other.position_ND)


def test_every_second_position_of_twice_the_size_is_one_that_was_trained() -> None:
    small = sincos_positions(4, 4, 16)
    large = sincos_positions(8, 8, 16, (4, 4)).view(8, 8, 16)
    assert torch.equal(large[::2, ::2].reshape(16, 16), small)


def test_weights_are_of_the_same_names_and_shapes_at_every_size() -> None:
    small = Dit(patch=2, hidden=16, depth=1, heads=2)
    large = small.model_copy(update={"position_grid": (4, 4)})
    assert expected_tensors(small, (1, 8, 8)) == expected_tensors(large, (1, 16, 16))
