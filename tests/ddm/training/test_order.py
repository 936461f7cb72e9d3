import numpy as np
import pytest

from ddm.training.order import in_epochs


@pytest.mark.parametrize(("num", "batch_size"), [(10, 3), (10, 10), (3, 8), (64, 16)])
def test_every_epoch_uses_every_image_once(num: int, batch_size: int) -> None:
    chosen = np.concatenate([in_epochs(0, step, batch_size, num) for step in range(5 * num)])
    epochs = chosen.reshape(-1, num)
    assert (np.sort(epochs, axis=1) == np.arange(num)).all()
    assert len({tuple(epoch) for epoch in epochs}) > 1, "every epoch has an order of its own"


def test_order_depends_on_seed_and_step_alone() -> None:
    batches = [in_epochs(1, step, 4, 10).tolist() for step in (7, 0, 7, 3, 7)]
    assert batches[0] == batches[2] == batches[4]
    assert batches[0] != in_epochs(2, 7, 4, 10).tolist()
