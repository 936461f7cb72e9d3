"""What the transformers over patches have in common: the embedding of patches, their positions, and the time."""

# Shape legend: N tokens, D hidden width.
from torch import Tensor, nn

from ddm.models.layers import TimeEmbedding, check_fit, sincos_positions
from ddm.models.network import ExpertNetwork
from ddm.protocol.architecture import Condition, Dit, Mmdit, Shape


class PatchTransformer(ExpertNetwork):
    """A transformer whose tokens are an image's patches.

    Args:
        architecture: its sizes.
        shape: one image, (C, H, W).
        condition: the kind of condition that it takes.
        device: where the weights are created; on ``meta`` they have no memory, and the caller assigns them.

    Raises:
        ShapeError: the architecture does not fit the shape or the condition.
    """

    position_ND: Tensor

    def __init__(
        self,
        architecture: Dit | Mmdit,
        shape: Shape,
        condition: Condition,
        device: str | None,
    ) -> None:
        super().__init__()
        check_fit(architecture, shape, condition)
        self.shape = shape
        self.patch = architecture.patch
        channels = shape[0]
        self.patch_values = channels * self.patch * self.patch
        rows, columns = architecture.patch_grid(shape)
        self.num_tokens = rows * columns
        hidden = architecture.hidden

        # The order in which layers are made decides which random numbers each one gets.
        self.embed = nn.Linear(self.patch_values, hidden, device=device)
        positions = sincos_positions(rows, columns, hidden, architecture.position_grid)
        self.register_buffer("position_ND", positions, persistent=False)
        self.time = TimeEmbedding(hidden, device)
