"""A frozen CLIP image encoder from a local folder, for evaluation; opened as strictly as a text encoder.

The folder is one of transformers': `config.json`, safetensors weights, and `preprocessor_config.json` where the input
is not normalised as OpenAI's networks want it. It is only read here; settings and tensors are handed to transformers,
which downloads nothing and runs no code beside the weights. Other files in the folder are not read.
"""

# Shape legend: N images, B images of one block, C channels, H height, W width.
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.encoders.text import CONFIG, quiet, weight_files
from ddm.errors import ArchipelagoError, DataError, SetupError
from ddm.io.files import read_bounded, require_file
from ddm.io.tensors import load_tensors
from ddm.protocol.base import sha256_file, sha256_hex
from ddm.protocol.data import DataSpec
from ddm.system.devices import device_named
from ddm.system.progress import ProgressCallback

PREPROCESSING = "preprocessor_config.json"
# All blocks have this size, so that features do not depend on the number of images.
BLOCK = 64
_MAX_SMALL_BYTES = 1 << 20
_MAX_WEIGHT_BYTES = 64 * 1024**3
# Of OpenAI's CLIP.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_KINDS = ("clip", "clip_vision_model")


class ClipVision:
    """A frozen image tower with its projection.

    Args:
        net: returns `image_embeds`, shape (B, D).
        mean: the mean of each colour channel, on [0, 1].
        std: likewise.
        data: the plan's shape and range of images.
        digest: sha256 over the digests of the files that were read.
    """

    def __init__(
        self,
        net: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        data: DataSpec,
        digest: str,
    ) -> None:
        self.net = net.eval().requires_grad_(False)
        self.mean = mean
        self.std = std
        self.data = data
        self.digest = digest
        self.device = device_named()

    @classmethod
    def open(cls, folder: Path, data: DataSpec) -> "ClipVision":
        """Open a folder.

        Raises:
            MissingFileError: a file is missing.
            SetupError: no CLIP of transformers with all of its weights.
            TensorFileError: the weights are not safetensors, or not finite.
            DataError: volumes, or images with a number of channels other than 1 or 3.
        """
        if len(data.shape) != 3 or data.shape[0] not in (1, 3):
            raise DataError(
                "images",
                expected="1 or 3 channels, height and width",
                got=" x ".join(str(side) for side in data.shape),
            )
        # The cache of Hugging Face holds links, which the readers of files refuse.
        config_path = require_file(folder / CONFIG, "a CLIP's configuration").resolve()
        small_files = {CONFIG: read_bounded(config_path, _MAX_SMALL_BYTES)}
        preprocessing_path = folder / PREPROCESSING
        if preprocessing_path.is_file():
            small_files[PREPROCESSING] = read_bounded(
                preprocessing_path.resolve(), _MAX_SMALL_BYTES
            )
        digest_lines = [f"{name} {sha256_hex(content)}" for name, content in small_files.items()]
        weights: dict[str, Tensor] = {}
        for name in weight_files(folder):
            path = require_file(folder / name, "a CLIP's weights").resolve()
            # The bytes that are hashed are those that become tensors.
            digest = sha256_file(path)
            weights |= load_tensors(path, None, max_bytes=_MAX_WEIGHT_BYTES, digest=digest)
            digest_lines.append(f"{name} {digest}")
        try:
            with quiet():
                net = _network(json.loads(small_files[CONFIG]), weights)
            mean, std = _normalisation(json.loads(small_files.get(PREPROCESSING, b"{}")))
        except ArchipelagoError:
            raise
        except ImportError as error:
            raise SetupError(
                "CLIP",
                expected="an installed transformers",
                got=str(error)[:200],
                remedy="Install it: in Archipelago's repository, pip install '.[text]'.",
            ) from error
        # Transformers and torch raise all kinds of errors for settings that fit no network.
        except Exception as error:
            raise SetupError(
                f"CLIP in {folder.name}",
                expected="a CLIP of transformers, with all weights of its image tower and projection",
                got=" ".join(f"{type(error).__name__}: {error}".split())[:200],
            ) from error
        return cls(net, mean, std, data, sha256_hex("\n".join(digest_lines).encode()))

    @property
    def dim(self) -> int:
        """The number of features."""
        return int(self.net.config.projection_dim)  # type: ignore[union-attr, arg-type]

    @torch.inference_mode()
    def encode(self, images: Tensor, on_progress: ProgressCallback | None = None) -> Tensor:
        """Return the projected embeddings of images, shape (N, D), float32.

        Args:
            images: shape (N, C, H, W), in the plan's range.
            on_progress: called with images done and images in all.

        Raises:
            DataError: features that are not finite.
        """
        net = self.net.to(self.device)
        features_ND = torch.empty(len(images), self.dim)
        for start in range(0, len(images), BLOCK):
            block = images[start : start + BLOCK]
            num = len(block)
            padded = torch.cat([block, block[-1:].expand(BLOCK - num, -1, -1, -1)])
            output = net(pixel_values=self.prepare(padded.to(self.device)))
            features_ND[start : start + num] = output.image_embeds[:num].float().cpu()
            if on_progress:
                on_progress(start + num, len(images))
        if not bool(features_ND.isfinite().all()):
            raise DataError("features of CLIP", expected="finite numbers", got="NaN or infinity")
        return features_ND

    def prepare(self, images: Tensor) -> Tensor:
        """Return the network's input: three channels, the shorter side resized, the centre cut out, normalised."""
        low, high = self.data.range
        x_BCHW = ((images.float() - low) / (high - low)).expand(-1, 3, -1, -1)
        size = int(self.net.config.image_size)  # type: ignore[union-attr, arg-type]
        height, width = x_BCHW.shape[2:]
        shorter = min(height, width)
        sides = [size * height // shorter, size * width // shorter]
        if sides != [height, width]:
            x_BCHW = F.interpolate(
                x_BCHW, sides, mode="bicubic", antialias=True, align_corners=False
            ).clamp(0, 1)
        top = (sides[0] - size) // 2
        left = (sides[1] - size) // 2
        x_BCHW = x_BCHW[:, :, top : top + size, left : left + size]
        mean = torch.tensor(self.mean, device=x_BCHW.device)[:, None, None]
        std = torch.tensor(self.std, device=x_BCHW.device)[:, None, None]
        return (x_BCHW - mean) / std


def _network(settings: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """Build the image tower from settings and weights only."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    if settings.get("model_type") not in _KINDS:
        raise ValueError(f"its model_type is {str(settings.get('model_type'))[:40]!r}, not clip")
    if settings.get("quantization_config"):
        # Transformers reads them with code that it would download.
        raise ValueError("its weights are quantized")
    if settings["model_type"] == "clip":
        config = CLIPVisionConfig.from_dict(settings.get("vision_config") or {})
        # The whole network's, whatever its image tower says.
        config.projection_dim = settings.get("projection_dim", 512)
    else:
        config = CLIPVisionConfig.from_dict(settings)
    net: nn.Module
    net, report = CLIPVisionModelWithProjection.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    problems = [*report["missing_keys"], *report["mismatched_keys"], *report["error_msgs"]]
    if problems:
        raise ValueError(f"{len(problems)} weights are missing or of another shape")
    return net


def _normalisation(settings: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean = tuple(float(value) for value in settings.get("image_mean", _MEAN))
    std = tuple(float(value) for value in settings.get("image_std", _STD))
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"{PREPROCESSING} names no mean and deviation of three channels")
    return mean, std
