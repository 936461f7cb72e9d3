"""The timm encoder: features of a frozen network, with weights from a local file and timm's own preprocessing.

Only this file imports timm, which imports torchvision (`ddm.system.torchvision_guard`).
"""

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.encoders.non_finite import replace_non_finite
from ddm.errors import DataError, SetupError, ShapeError
from ddm.images.rows import Images
from ddm.io.tensors import TensorSpec, load_tensors, read_header, refuse_wrapped_names, spec_of
from ddm.protocol.data import DataSpec
from ddm.protocol.encoder import TimmEncoderSpec
from ddm.system.devices import device_named
from ddm.system.progress import ProgressCallback

# Shape legend: N images, B images of one block, C channels, H height, W width.

MAX_FILE_BYTES = 8 * 1024**3
# All blocks have this size, so that features do not depend on the number of images.
_BLOCK = 64
# Counters of batch norms, which only training uses.
_COUNTERS = "num_batches_tracked"


def create_model(name: str, **options: Any) -> nn.Module:
    """Build a network of timm with random weights; nothing is downloaded.

    Raises:
        SetupError: timm has no network of this name, or none with these options.
    """
    with warnings.catch_warnings():
        # Third-party imports warn.
        warnings.simplefilter("ignore")
        import timm
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
    # Timm has no error of its own for options that do not fit.
    except Exception as error:
        raise SetupError(
            "encoder",
            expected="a network that timm has",
            got=f"{name!r}: {error}"[:200],
            remedy="List the names: python -c 'from ddm.encoders.timm import names; print(*names())'.",
        ) from error
    return model


def names() -> list[str]:
    """Return the names of timm's networks."""
    import timm

    return list(timm.list_models())


class TimmEncoder:
    """A frozen network and its preprocessing.

    Args:
        net: without a classifier.
        spec: the plan's: preprocessing and number of features.
        data: the plan's shape and range of images.
    """

    def __init__(
        self,
        net: nn.Module,
        spec: TimmEncoderSpec,
        data: DataSpec,
    ) -> None:
        self.net = net.eval().requires_grad_(False)
        self.spec = spec
        self.data = data
        self.device = device_named()
        self.num_at_once = _BLOCK

    @property
    def dim(self) -> int:
        """The number of features."""
        return self.spec.dim

    def for_single_samples(self) -> "TimmEncoder":
        """Return it computing each image alone, so that no bit of a feature depends on other images."""
        single = copy(self)
        single.num_at_once = 1
        return single

    @torch.inference_mode()
    def encode(
        self,
        images: Images,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return features, shape (N, dim), float32; in half precision on a GPU.

        Args:
            images: shape (N, C, H, W), in the plan's range.
            on_progress: called with images done and images in all.
            replacement: every feature of an image whose features are not all finite; None refuses them.

        Raises:
            ShapeError: images of another shape than the plan's.
            DataError: features that are not finite, for example by overflow in half precision.
        """
        if tuple(images.shape[1:]) != self.data.shape:
            raise ShapeError(
                "image", expected=str(self.data.shape), got=str(tuple(images.shape[1:]))
            )
        self.net.to(self.device)
        features_ND = torch.empty(len(images), self.dim)
        for start in range(0, len(images), _BLOCK):
            block = images[start : start + _BLOCK]
            stop = start + len(block)
            features = [self._features_of(piece) for piece in torch.split(block, self.num_at_once)]
            features_ND[start:stop] = torch.cat(features)
            if on_progress:
                on_progress(stop, len(images))
        return replace_non_finite(features_ND, replacement, self._not_finite_error)

    def _features_of(self, images: Tensor) -> Tensor:
        num = len(images)
        padding = images[-1:].expand(self.num_at_once - num, -1, -1, -1)
        padded = torch.cat([images, padding]).to(self.device)
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            features_BD = self._features(self.prepare(padded))
        return features_BD[:num].float().cpu()

    def _features(self, x_BCHW: Tensor) -> Tensor:
        """Return what timm's classifier would read."""
        hidden = self.net.forward_features(x_BCHW)  # type: ignore[operator]
        features: Tensor = self.net.forward_head(hidden, pre_logits=True)  # type: ignore[operator]
        return features

    def _not_finite_error(self) -> DataError:
        return DataError(
            f"features of {self.spec.model}", expected="finite numbers", got="NaN or infinity"
        )

    def prepare(self, images: Tensor) -> Tensor:
        """Return the network's input: scaled to [0, 1], with its channels and size, then normalised.

        Greyscale images are repeated for a network with colour channels. The shorter side is resized to the input's
        side divided by the crop share, and the centre is cut out, as timm does for evaluation on 8-bit images.
        """
        low, high = self.data.range
        x_BCHW = ((images.float() - low) / (high - low)).expand(-1, len(self.spec.mean), -1, -1)
        height, width = self.spec.image_size
        old_height, old_width = x_BCHW.shape[2:]
        # Fractions, since a rounded scale would miss the input's side by a pixel.
        scale = max(
            Fraction(int(height / self.spec.crop), old_height),
            Fraction(int(width / self.spec.crop), old_width),
        )
        size = [int(scale * old_height), int(scale * old_width)]
        if size != [old_height, old_width]:
            options: dict[str, Any] = {"mode": self.spec.interpolation}
            if self.spec.interpolation != "nearest":
                options |= {"antialias": True, "align_corners": False}
            x_BCHW = F.interpolate(x_BCHW, size, **options).clamp(0, 1)
        top = round((size[0] - height) / 2)
        left = round((size[1] - width) / 2)
        x_BCHW = x_BCHW[:, :, top : top + height, left : left + width]
        mean = torch.tensor(self.spec.mean, device=x_BCHW.device)[:, None, None]
        std = torch.tensor(self.spec.std, device=x_BCHW.device)[:, None, None]
        return (x_BCHW - mean) / std

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of this encoder."""
        return _weights(self.net)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        spec: TimmEncoderSpec,
        data: DataSpec,
    ) -> "TimmEncoder":
        """Rebuild the encoder from tensors loaded against `timm_specs`."""
        net = _build(spec.model, len(spec.mean), spec.image_size)
        net.load_state_dict(dict(net.state_dict()) | dict(tensors))
        return cls(net, spec, data)

    @classmethod
    def from_file(
        cls,
        model: str,
        weights: Path,
        data: DataSpec,
        image_size: tuple[int, int] | None = None,
    ) -> "TimmEncoder":
        """Open a network's weights from a local file; tensors beyond it, such as a classifier, are left out.

        Args:
            model: its name in timm.
            weights: a safetensors file with timm's names.
            data: the plan's shape and range of images.
            image_size: height and width of the input, the network's own when omitted.

        Raises:
            SetupError: not a safetensors file, not this network's weights, or a size that it does not take.
        """
        if weights.suffix != ".safetensors":
            got = "a name without an ending"
            if weights.suffix:
                got = f"a file with the ending {weights.suffix}"
            raise SetupError(
                str(weights),
                expected="a .safetensors file",
                got=got,
                remedy="Convert it once: load it with weights_only=True, write it with "
                "safetensors.torch.save_file.",
            )
        # The cache of Hugging Face holds links, which the readers of files refuse.
        weights_path = weights.resolve()
        header = read_header(weights_path, max_bytes=MAX_FILE_BYTES)
        refuse_wrapped_names(header, str(weights))
        channels = _input_channels(model, header, data)
        net = _build(model, channels, None)
        expected_specs = {name: spec_of(tensor) for name, tensor in _weights(net).items()}
        missing = sorted(name for name, spec in expected_specs.items() if header.get(name) != spec)
        if missing:
            raise SetupError(
                str(weights),
                expected=f"the weights of {model}",
                got=f"a file in which {len(missing)} of {len(expected_specs)} tensors differ or are "
                f"missing, first {missing[0]}",
                remedy="Name the network that these weights belong to, or give the weights of this one, with timm's "
                "names.",
            )
        tensors = load_tensors(weights_path, header, max_bytes=MAX_FILE_BYTES, max_abs=None)
        # The counters of batch norms, which files may lack, stay the network's own.
        own_tensors = {name: tensors[name] for name in expected_specs}
        net.load_state_dict(dict(net.state_dict()) | own_tensors)
        own_size = _own_size(net)
        # A transformer resamples its position embeddings here.
        if image_size and hasattr(net, "set_input_size"):
            try:
                net.set_input_size(img_size=tuple(image_size))  # type: ignore[operator]
            except Exception as error:
                raise _wrong_size(net, model, image_size, own_size, error) from error
        encoder = cls(net, _spec(net, model, "file", image_size, channels), data)
        encoder.check_runs(image_size, own_size)
        return encoder

    @classmethod
    def random(
        cls,
        model: str,
        data: DataSpec,
        seed: int,
        image_size: tuple[int, int] | None = None,
    ) -> "TimmEncoder":
        """Build a network with random weights.

        Raises:
            SetupError: timm has no network of this name, or it does not take this size.
            DataError: images with a number of channels other than 1 or 3.
        """
        channels = data.shape[0]
        if channels not in (1, 3):
            raise DataError("images", expected="1 or 3 channels", got=str(channels))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _build(model, channels, image_size)
        encoder = cls(net, _spec(net, model, "random", image_size, channels), data)
        encoder.check_runs(image_size, _own_size(net))
        return encoder

    @torch.inference_mode()
    def check_runs(self, image_size: tuple[int, int] | None, own_size: tuple[int, int]) -> None:
        """Call the network on one blank image, because only that shows whether it takes images of this size.

        Args:
            image_size: the size that the recipe gives; None for the network's own.
            own_size: the size that the network was made for.

        Raises:
            SetupError: the call fails, or gives other than `dim` features; names the field of the recipe.
        """
        if len(self.data.shape) != 3:
            raise SetupError(
                "recipe, encoder.kind",
                expected="an encoder of volumes, such as pca, since networks of timm take images "
                "(C, H, W)",
                got=f"timm for data.shape {self.data.shape}",
            )
        try:
            blank = torch.full((1, *self.data.shape), self.data.range[0])
            features = self._features(self.prepare(blank))
            if tuple(features.shape) != (1, self.dim):
                raise ValueError(
                    f"features of shape {tuple(features.shape[1:])} in place of {self.dim} values"
                )
        # Timm and torch raise all kinds of errors, for each network another one.
        except Exception as error:
            if image_size is not None:
                raise _wrong_size(self.net, self.spec.model, image_size, own_size, error) from error
            raise SetupError(
                "recipe, encoder.model",
                expected="a network of timm that turns an image into one row of features",
                got=f"{self.spec.model}, which fails: {_one_line(error)}",
                remedy="Choose another network, or set encoder.image_size to a size that it takes.",
            ) from error


def timm_specs(spec: TimmEncoderSpec) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored encoder.

    Raises:
        SetupError: the installed timm has no such network.
    """
    with torch.device("meta"):
        net = _build(spec.model, len(spec.mean), spec.image_size)
    return {name: spec_of(tensor) for name, tensor in _weights(net).items()}


def timm_bytes(spec: TimmEncoderSpec) -> int:
    """Return the bytes of everything that the network holds once it is built, weights and computed tables.

    Raises:
        SetupError: the installed timm has no such network.
    """
    with torch.device("meta"):
        net = _build(spec.model, len(spec.mean), spec.image_size)
    return sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))


def _build(
    model: str,
    channels: int,
    image_size: tuple[int, int] | None,
) -> nn.Module:
    """Build a network without its classifier; the input's size is passed to networks that take it."""
    options: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    if image_size is None:
        return create_model(model, **options)
    try:
        return create_model(model, img_size=tuple(image_size), **options)
    except SetupError:
        # Networks of convolutions take any size, and no option for it.
        return create_model(model, **options)


def _own_size(net: nn.Module) -> tuple[int, int]:
    """Return height and width that a network was made for, whatever size it was built with."""
    config: Any = net.pretrained_cfg
    height, width = config["input_size"][1:]
    return int(height), int(width)


def _wrong_size(
    net: nn.Module,
    model: str,
    image_size: tuple[int, int],
    own_size: tuple[int, int],
    error: Exception,
) -> SetupError:
    """Return the error for an input size that a network does not take."""
    expected = f"a size of images that {model} takes"
    remedy = f"Leave the field out for its own size, {list(own_size)}."
    patches = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    if isinstance(patches, tuple) and len(patches) == 2:
        # A transformer divides the image into patches of this size, without a rest.
        expected += f": multiples of its patch of {patches[0]} x {patches[1]} pixels"
        fitting = [
            max(1, ceil(side / patch)) * patch
            for side, patch in zip(image_size, patches, strict=True)
        ]
        if fitting != list(image_size):
            remedy = f"Set it to {fitting}, or leave it out for the network's own size, {list(own_size)}."
    return SetupError(
        "recipe, encoder.image_size",
        expected=expected,
        got=f"{list(image_size)}, with which it fails: {_one_line(error)}",
        remedy=remedy,
    )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _spec(
    net: nn.Module,
    model: str,
    weights: str,
    image_size: tuple[int, int] | None,
    channels: int,
) -> TimmEncoderSpec:
    """Return timm's data config of this network as a plan states it."""
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(net)
    if config.get("crop_mode", "center") != "center":
        raise SetupError(
            "encoder",
            expected="a network with crop mode center",
            got=f"{model} with crop mode {config['crop_mode']}",
        )
    size = tuple(image_size or config["input_size"][1:])
    return TimmEncoderSpec.model_validate(
        {
            "dim": int(getattr(net, "head_hidden_size", net.num_features)),  # type: ignore[arg-type]
            "model": model,
            "weights": weights,
            "image_size": size,
            "interpolation": config["interpolation"],
            "crop": 1.0 if image_size else float(config["crop_pct"]),
            "mean": _per_channel(config["mean"], channels),
            "std": _per_channel(config["std"], channels),
        }
    )


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a value for each channel: those given, or their mean for another number of channels."""
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (sum(float(value) for value in values) / len(values),) * channels


def _input_channels(
    model: str,
    header: Mapping[str, TensorSpec],
    data: DataSpec,
) -> int:
    """Return the number of channels that the file's first layer takes, after checking the images against it."""
    net = create_model(model, num_classes=0)
    first_layers = net.pretrained_cfg["first_conv"]  # type: ignore[index]
    if isinstance(first_layers, str):
        first_layers = (first_layers,)
    channels = 3
    if first_layers:
        spec = header.get(f"{first_layers[0]}.weight")
        if spec and len(spec.shape) == 4:
            channels = spec.shape[1]
    if data.shape[0] not in (1, channels):
        raise DataError(
            "images", expected=f"1 or {channels} channels, as {model} takes", got=str(data.shape[0])
        )
    return channels


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in net.state_dict().items() if not name.endswith(_COUNTERS)
    }
