"""The convolutional expert for images and volumes: MONAI's DiffusionModelUNet, called as every expert is."""

# Shape legend: B batch, ... sample dimensions (C, H, W) or (C, D, H, W), L text tokens, D width of a text token.
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.conditions import check_text, class_rows
from ddm.models.layers import check_fit, check_input, outer_values
from ddm.models.network import Activations, ExpertNetwork
from ddm.protocol.architecture import (
    ClassCondition,
    Condition,
    NoCondition,
    Shape,
    TextCondition,
    Unet,
)
from ddm.system.monai import monai_networks

# MONAI's embedding of the time is made for steps 0 to 999.
TIME_SCALE = 1000.0

# Values that a residual block holds, for each voxel and channel: at once in a forward pass, and for the gradient of its
# inputs and outputs. Then those of an attention, alone and in a transformer that reads a text.
_RESNET_FORWARD = 6
_INPUT_GRADIENT = 4
_OUTPUT_GRADIENT = 6
_ATTENTION_GRADIENT = 10
_TRANSFORMER_GRADIENT = 36


class UnetNetwork(ExpertNetwork):
    """MONAI's diffusion U-Net; a fresh one returns 0, since its last convolution starts at zero.

    A class is added to the time. A text enters by cross-attention, which in MONAI has no mask: every text is padded to
    the plan's `max_tokens` with a learned token, so that the output does not depend on how a text was padded before.

    Args:
        architecture: its sizes.
        shape: one image, (C, H, W), or volume, (C, D, H, W).
        condition: the kind of condition that it takes.
        device: where the weights are created; on ``meta`` they have no memory, and the caller assigns them.

    Raises:
        ShapeError: the architecture does not fit the shape.
        SetupError: MONAI is not installed.

    Source:
        Rombach et al. 2022; Pinaya et al. 2023, arXiv 2307.15208.
    """

    def __init__(
        self,
        architecture: Unet,
        shape: Shape,
        condition: Condition = NoCondition(),
        device: str | None = None,
    ) -> None:
        super().__init__()
        check_fit(architecture, shape, condition)
        self.architecture = architecture
        self.shape = shape
        self.condition = condition
        if device is None:
            self.net = _monai_unet(architecture, shape, condition)
        else:
            with torch.device(device):
                self.net = _monai_unet(architecture, shape, condition)
        self.null = None
        if isinstance(condition, TextCondition):
            self.null = nn.Parameter(torch.zeros(condition.dim, device=device))

        # In the decoder, a level's first convolution reads the level below and the skip connection.
        levels = range(len(architecture.channels))
        self.widest_output = 2 * max(
            architecture.channels[level] * _voxels(shape, level) for level in levels
        )

    def forward(
        self,
        x_B: Tensor,
        t_B: Tensor,
        c: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction at (x, t).

        Args:
            x_B: noised samples, shape (B, ...).
            t_B: times in [0, 1], shape (B,).
            c: classes (B,) or texts (B, L, D), see `ddm.models.conditions`; None for the null condition.

        Returns:
            Shape (B, ...), velocity or eps by the objective.

        Raises:
            ShapeError: samples of another shape than the model's, not one time per sample, or a condition of another
                form than the model's.
        """
        check_input(x_B, t_B, self.shape)
        classes = None
        context = None
        match self.condition:
            case NoCondition():
                if c is not None:
                    raise ShapeError(
                        "condition",
                        expected="no condition: the model is unconditional",
                        got=f"a condition of shape {tuple(c.shape)}",
                    )
            case ClassCondition():
                classes = class_rows(c, t_B.shape[0], x_B.device)
            case TextCondition():
                context = self._context(c, t_B.shape[0], self.condition)
        out: Tensor = self.net(x_B, TIME_SCALE * t_B, context=context, class_labels=classes)
        return out

    def _context(
        self,
        c_BLD: Tensor | None,
        num: int,
        condition: TextCondition,
    ) -> Tensor:
        """Return exactly `max_tokens` tokens, shape (B, L, D)."""
        null = torch.as_tensor(self.null)
        if c_BLD is None:
            return null.expand(num, condition.max_tokens, -1)
        check_text(c_BLD, num, condition)
        missing = condition.max_tokens - c_BLD.shape[1]
        padded_BLD = F.pad(c_BLD, (0, 0, 0, missing))
        is_token_BL1 = (padded_BLD != 0).any(-1, keepdim=True)
        return torch.where(is_token_BL1, padded_BLD, null)

    def activations(self) -> Activations:
        """See `ExpertNetwork`."""
        channels = self.architecture.channels
        attention_gradient = _ATTENTION_GRADIENT
        resnet_forward = _RESNET_FORWARD
        num_text = 0
        if isinstance(self.condition, TextCondition):
            attention_gradient = _TRANSFORMER_GRADIENT
            resnet_forward = 3 * _RESNET_FORWARD
            num_text = self.condition.max_tokens

        outside = outer_values(self.shape, self.condition)
        skips = channels[0] * _voxels(self.shape, 0)
        widest = skips
        # The innermost attention, which every network has.
        gradient = attention_gradient * channels[-1] * _voxels(self.shape, len(channels) - 1)
        for stage in _stages(self.architecture):
            voxels = _voxels(self.shape, stage.level)
            for num_in, num_out in stage.resnets:
                gradient += voxels * (_INPUT_GRADIENT * num_in + _OUTPUT_GRADIENT * num_out)
                if stage.attends:
                    gradient += (attention_gradient * voxels + 4 * num_text) * num_out
                widest = max(widest, voxels * max(num_in, num_out))
                skips += voxels * num_out
            if stage.resamples:
                # On the way up it reads twice the sides; the outputs of both ways are counted alike.
                resampled = stage.width * _voxels(self.shape, max(stage.level - 1, 0))
                gradient += 2 * resampled
                widest = max(widest, resampled)
        return Activations(
            widest=widest,
            forward=skips + resnet_forward * widest + outside,
            gradient=gradient + outside,
        )


@dataclass(frozen=True)
class _Stage:
    """The residual blocks of one level of a U-Net, on the way down or up.

    Attributes:
        level: 0 has the sample's own sides, each further one half of them.
        resnets: channels in and out of each residual block.
        attends: whether attention follows each.
        resamples: whether a convolution halves or doubles the sides at the end.
    """

    level: int
    resnets: tuple[tuple[int, int], ...]
    attends: bool
    resamples: bool

    @property
    def width(self) -> int:
        """The channels of its output."""
        return self.resnets[-1][1]


def _stages(architecture: Unet) -> Iterator[_Stage]:
    """Yield the stages in the order in which a sample passes them: down, the middle, up."""
    channels = architecture.channels
    num_resnets = architecture.num_res_blocks
    last = len(channels) - 1

    num_in = channels[0]
    for level, width in enumerate(channels):
        # The first block of a stage changes the width, the others keep it.
        others = [(width, width)] * (num_resnets - 1)
        resnets = ((num_in, width), *others)
        attends = architecture.attention[level]
        yield _Stage(level, resnets, attends, resamples=level < last)
        num_in = width

    middle = (channels[-1], channels[-1])
    yield _Stage(last, (middle, middle), attends=False, resamples=False)

    # On the way up there is one block more, and each also reads the output of its counterpart on the way down.
    for level in range(last, -1, -1):
        width = channels[level]
        width_below = channels[max(level - 1, 0)]
        widths = [width] * num_resnets
        num_inputs = [num_in, *widths]
        num_skips = [*widths, width_below]
        joined = []
        for num_input, num_skip in zip(num_inputs, num_skips, strict=True):
            joined.append((num_input + num_skip, width))
        attends = architecture.attention[level]
        yield _Stage(level, tuple(joined), attends, resamples=level > 0)
        num_in = width


def _voxels(shape: Shape, level: int) -> int:
    return prod(side // 2**level for side in shape[1:])


def _monai_unet(
    architecture: Unet,
    shape: Shape,
    condition: Condition,
) -> nn.Module:
    text_dim = None
    num_class_rows = None
    if isinstance(condition, TextCondition):
        text_dim = condition.dim
    if isinstance(condition, ClassCondition):
        num_class_rows = 1 + condition.num_classes
    net: nn.Module = monai_networks("architecture unet").DiffusionModelUNet(
        spatial_dims=len(shape) - 1,
        in_channels=shape[0],
        out_channels=shape[0],
        num_res_blocks=architecture.num_res_blocks,
        channels=architecture.channels,
        attention_levels=architecture.attention,
        norm_num_groups=architecture.norm_groups,
        num_head_channels=architecture.head_channels,
        with_conditioning=text_dim is not None,
        cross_attention_dim=text_dim,
        num_class_embeds=num_class_rows,
        use_flash_attention=True,
    )
    return net


NETWORK = UnetNetwork
