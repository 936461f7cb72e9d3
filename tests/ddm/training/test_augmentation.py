import numpy as np
import pytest
import torch
from torch import Tensor

from ddm.errors import ShapeError
from ddm.training.augmentation import augment
from tests.support.errors import has_subject
from tests.support.recipes import training


def change(x: Tensor, **fields: object) -> Tensor:
    return augment(x, training(**fields), np.random.default_rng(0))


def test_nothing_is_drawn_where_the_recipe_asks_for_nothing() -> None:
    random = np.random.default_rng(0)
    x = torch.rand(4, 1, 6, 6)
    assert augment(x, training(), random) is x
    assert random.random() == np.random.default_rng(0).random()


def test_about_half_of_the_images_are_mirrored() -> None:
    x = torch.rand(1000, 2, 5, 6)
    changed = change(x, flip=True)
    mirrored = (changed == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (changed == x).flatten(1).all(1)).all())
    assert 400 < int(mirrored.sum()) < 600


@pytest.mark.parametrize("shape", [(1, 9, 9), (2, 5, 9, 9)])
def test_images_move_by_at_most_the_pixels_of_the_recipe(shape: tuple[int, ...]) -> None:
    x = torch.zeros(500, *shape)
    middle = tuple(side // 2 for side in shape[1:])
    x[(slice(None), slice(None), *middle)] = 1.0
    places = change(x, crop=2)[:, 0].nonzero()
    assert len(places) == 500
    for axis, side in enumerate(middle, start=1):
        assert set((places[:, axis] - side).tolist()) == {-2, -1, 0, 1, 2}


def test_edges_are_repeated_when_an_image_moves() -> None:
    x = torch.arange(4.0).expand(100, 1, 4, 4)
    rows = {tuple(row) for row in change(x, crop=1)[:, 0, 0].tolist()}
    assert rows == {(0.0, 0.0, 1.0, 2.0), (0.0, 1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 3.0)}


def test_samples_without_sides_are_refused() -> None:
    with pytest.raises(ShapeError, check=has_subject("augmentation")):
        change(torch.rand(4, 3), flip=True)
