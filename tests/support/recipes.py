"""Recipes for tests that vary one field of them."""

from typing import Any

from ddm.protocol.learning import Training

SMALL: dict[str, Any] = {
    "num_steps": 100,
    "batch_size": 8,
    "learning_rate": 0.01,
    "weight_decay": 0.01,
    "ema_decay": 0.9,
}


def training(**changes: Any) -> Training:
    """Return a small recipe with some fields changed; a field changed to None is left out."""
    fields = SMALL | changes
    return Training.model_validate(
        {name: value for name, value in fields.items() if value is not None}
    )
