"""The convolutional expert for images and volumes: MONAI's DiffusionModelUNet, called as every expert is."""

# Shape legend: B batch, ... sample dimensions (C, H, W) or (C, D, H, W), L text tokens, D width of a text token.
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.errors import ShapeError
from ddm.models.conditions import check_text, class_rows
from ddm.models.layers import check_fit, check_input
from ddm.protocol.architecture import ClassCondition, Condition, NoCondition, TextCondition, Unet
from ddm.system.monai import monai_networks

TIME_SCALE = 1000.0  # MONAI's embedding of the time is made for steps 0 to 999


class UNet(nn.Module):
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
        shape: tuple[int, ...],
        condition: Condition = NoCondition(),
        device: str | None = None,
    ) -> None:
        super().__init__()
        check_fit(architecture, shape, condition)
        self.shape, self.condition = shape, condition
        if device is None:
            self.net = _monai_unet(architecture, shape, condition)
        else:
            with torch.device(device):
                self.net = _monai_unet(architecture, shape, condition)
        self.null = None
        if isinstance(condition, TextCondition):
            self.null = nn.Parameter(torch.zeros(condition.dim, device=device))
        # In the decoder, a level's first convolution reads the level below and the skip connection.
        voxels, halved = prod(shape[1:]), 2 ** (len(shape) - 1)
        self.widest = 2 * max(
            width * voxels // halved**i for i, width in enumerate(architecture.channels)
        )

    def forward(self, x_B: Tensor, t_B: Tensor, c: Tensor | None = None) -> Tensor:
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
        classes = context = None
        match self.condition:
            case NoCondition():
                if c is not None:
                    got = f"a condition of shape {tuple(c.shape)}"
                    raise ShapeError(
                        "condition", expected="no condition: the model is unconditional", got=got
                    )
            case ClassCondition():
                classes = class_rows(c, len(t_B), x_B.device)
            case TextCondition():
                context = self._context(c, len(t_B), self.condition)
        out: Tensor = self.net(x_B, TIME_SCALE * t_B, context=context, class_labels=classes)
        return out

    def _context(self, c_BLD: Tensor | None, num: int, condition: TextCondition) -> Tensor:
        """Return exactly `max_tokens` tokens, shape (B, L, D)."""
        if c_BLD is None:
            return torch.as_tensor(self.null).expand(num, condition.max_tokens, -1)
        check_text(c_BLD, num, condition)
        full_BLD = F.pad(c_BLD, (0, 0, 0, condition.max_tokens - c_BLD.shape[1]))
        return torch.where(
            (full_BLD != 0).any(-1, keepdim=True), full_BLD, torch.as_tensor(self.null)
        )


def _monai_unet(architecture: Unet, shape: tuple[int, ...], condition: Condition) -> nn.Module:
    text = condition if isinstance(condition, TextCondition) else None
    net: nn.Module = monai_networks("architecture unet").DiffusionModelUNet(
        spatial_dims=len(shape) - 1,
        in_channels=shape[0],
        out_channels=shape[0],
        num_res_blocks=architecture.num_res_blocks,
        channels=architecture.channels,
        attention_levels=architecture.attention,
        norm_num_groups=architecture.norm_groups,
        num_head_channels=architecture.head_channels,
        with_conditioning=text is not None,
        cross_attention_dim=text.dim if text else None,
        num_class_embeds=1 + condition.num_classes
        if isinstance(condition, ClassCondition)
        else None,
        use_flash_attention=True,
    )
    return net
