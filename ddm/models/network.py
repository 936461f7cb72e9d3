"""The base of every expert's network, and how many values and bytes a network takes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module

from torch import nn

from ddm.protocol.architecture import Architecture, Condition, Shape

FLOAT_BYTES = 4
# Of a weight in training: itself, its gradient, two moments, its average, and the average as it is written to disk.
_TRAINING_COPIES = 6
# Of a buffer while it is computed.
_BUFFER_COPIES = 3


@dataclass(frozen=True)
class Activations:
    """The values that a network has in memory for one sample, beside its weights.

    These are upper estimates, at least what one sample takes and at most a few times that. They follow from sizes by
    arithmetic, so that a plan which would exhaust a machine is refused before anything of that size is allocated.

    Attributes:
        widest: the output of the widest layer; tokens x width of a transformer.
        forward: a forward pass, at once.
        gradient: what a training step keeps for the gradient.
    """

    widest: int
    forward: int
    gradient: int


@dataclass(frozen=True)
class NetworkSize:
    """How large a network is.

    Attributes:
        parameters: the number of trained weights.
        buffers: values that are computed when it is built, such as positions.
        activations: values of one sample.
    """

    parameters: int
    buffers: int
    activations: Activations

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return FLOAT_BYTES * self.parameters

    def forward_bytes(self, batch: int) -> int:
        """Return the bytes of a forward pass of this many samples, without the weights."""
        return FLOAT_BYTES * (_BUFFER_COPIES * self.buffers + batch * self.activations.forward)

    def training_bytes(self, batch: int) -> int:
        """Return the bytes of a training step on this many samples, weights and optimiser included."""
        weights = _TRAINING_COPIES * self.bytes
        return weights + self.forward_bytes(batch) + FLOAT_BYTES * batch * self.activations.gradient


class ExpertNetwork(nn.Module, ABC):
    """A network that an architecture names; called as ``network(x_B, t_B)`` or ``network(x_B, t_B, condition)``.

    Attributes:
        widest_output: values of the largest output of a linear layer or convolution for one sample.
    """

    widest_output: int

    @abstractmethod
    def activations(self) -> Activations:
        """Return how many values one sample takes, by arithmetic; the network may be on the meta device."""


def build_network(
    architecture: Architecture,
    shape: Shape,
    condition: Condition,
    device: str | None = None,
) -> ExpertNetwork:
    """Build the network of an architecture: `NETWORK` in ``ddm/models/<kind>.py``.

    Args:
        architecture: its document. The kind is a literal of this document, never free text, and so is the module.
        shape: one sample in the experts' space.
        condition: the kind of condition that it takes.
        device: where the weights are created; on ``meta`` they have no memory, and the caller assigns them.

    Raises:
        ShapeError: the architecture does not fit the shape or the condition.
        SetupError: the architecture needs a library that is not installed.
    """
    module = import_module(f"ddm.models.{architecture.kind}")
    network: ExpertNetwork = module.NETWORK(architecture, shape, condition, device)
    return network


def size_of(network: ExpertNetwork) -> NetworkSize:
    """Return the size of a network, which may be on the meta device."""
    return NetworkSize(
        parameters=num_parameters(network),
        buffers=sum(buffer.numel() for buffer in network.buffers()),
        activations=network.activations(),
    )


def num_parameters(network: nn.Module) -> int:
    """Count the trained weights of a network."""
    return sum(parameter.numel() for parameter in network.parameters())
