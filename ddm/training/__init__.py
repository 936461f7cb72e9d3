"""Training an expert: the loop, what a step sees, what changes from step to step, and the machine that it runs on."""

from ddm.engine import Engine
from ddm.training.batches import Batch, Examples, Teach, draw_batch, draw_times
from ddm.training.loop import Progress, Trained, train
from ddm.training.state import WARMUP_STEPS, averaging_weight

__all__ = [
    "WARMUP_STEPS",
    "Batch",
    "Engine",
    "Examples",
    "Progress",
    "Teach",
    "Trained",
    "averaging_weight",
    "draw_batch",
    "draw_times",
    "train",
]
