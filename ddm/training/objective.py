"""What the network of an expert learns to predict: on which path, as which quantity, and at which times."""

from dataclasses import dataclass

from ddm.diffusion.path import LinearPath, Path, Prediction
from ddm.protocol.learning import TDistribution, UniformT


@dataclass(frozen=True)
class TrainingObjective:
    """The prediction that the loss compares with its target.

    Attributes:
        path: the probability path, from which x_t is made.
        t_distribution: the distribution of the training times.
        prediction: what the network predicts at x_t.
    """

    path: Path = LinearPath()
    t_distribution: TDistribution = UniformT()
    prediction: Prediction = "velocity"
