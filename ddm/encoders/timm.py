"""The timm encoder: features of a frozen network, with weights from a local file and timm's own preprocessing.

Only this file imports timm and torchvision. Next to a torch without CUDA, torchvision as published cannot load its
compiled operators, and its import fails; timm needs only its Python parts, for which defining two schemas suffices.
"""

import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm.encoders.lost import fill_lost
from ddm.errors import DataError, SetupError, ShapeError
from ddm.images.rows import Images
from ddm.io.tensors import TensorSpec, load_tensors, read_header, spec_of
from ddm.protocol.data import DataSpec
from ddm.protocol.encoder import TimmEncoder as TimmSpec
from ddm.system.devices import device_named

# Shape legend: N images, B images of one block, C channels, H height, W width.

MAX_FILE_BYTES = 8 * 1024**3
_BLOCK = 64  # all blocks have this size, so that features do not depend on the number of images
_COUNTERS = "num_batches_tracked"  # of batch norms; used in training only
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_schemas: list[torch.library.Library] = []


def create_model(name: str, **options: Any) -> nn.Module:
    """Build a network of timm with random weights; nothing is downloaded.

    Raises:
        SetupError: timm has no network of this name, or none with these options.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from third-party imports
        import_torchvision()
        import timm
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
    except Exception as error:  # timm has no error of its own for options that do not fit
        remedy = "List the names: python -c 'from ddm.encoders.timm import names; print(*names())'."
        raise SetupError(
            "encoder",
            expected="a network that timm has",
            got=f"{name!r}: {error}"[:200],
            remedy=remedy,
        ) from error
    return model


def names() -> list[str]:
    """Return the names of timm's networks."""
    create_model("test_vit")
    import timm

    return list(timm.list_models())


class TimmEncoder:
    """A frozen network and its preprocessing.

    Args:
        net: without a classifier.
        spec: the plan's: preprocessing and number of features.
        data: the plan's shape and range of images.
    """

    def __init__(self, net: nn.Module, spec: TimmSpec, data: DataSpec) -> None:
        self.net = net.eval().requires_grad_(False)
        self.spec = spec
        self.data = data
        self.device = device_named()

    @property
    def dim(self) -> int:
        """The number of features."""
        return self.spec.dim

    @torch.inference_mode()
    def encode(
        self,
        images: Images,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        lost: float | None = None,
    ) -> Tensor:
        """Return features, shape (N, dim), float32; in half precision on a GPU.

        Args:
            images: shape (N, C, H, W), in the plan's range.
            on_progress: called with images done and images in all.
            lost: what the features of an image become that are not all finite; None refuses them.

        Raises:
            ShapeError: images of another shape than the plan's.
            DataError: features that are not finite, for example by overflow in half precision.
        """
        if tuple(images.shape[1:]) != self.data.shape:
            raise ShapeError(
                "image", expected=str(self.data.shape), got=str(tuple(images.shape[1:]))
            )
        self.net.to(self.device)
        found = torch.empty(len(images), self.dim)
        for start in range(0, len(images), _BLOCK):
            block = images[start : start + _BLOCK]
            padded = torch.cat([block, block[-1:].expand(_BLOCK - len(block), -1, -1, -1)])
            with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
                features = self.net.forward_features(self.prepare(padded.to(self.device)))  # type: ignore[operator]
                features = self.net.forward_head(features, pre_logits=True)  # type: ignore[operator]
            found[start : start + len(block)] = features[: len(block)].float().cpu()
            if on_progress:
                on_progress(min(start + _BLOCK, len(images)), len(images))
        subject = f"features of {self.spec.model}"
        return fill_lost(
            found,
            lost,
            lambda: DataError(subject, expected="finite numbers", got="NaN or infinity"),
        )

    def prepare(self, images: Tensor) -> Tensor:
        """Return the network's input: scaled to [0, 1], with its channels and size, then normalised.

        Greyscale images are repeated for a network with colour channels. The shorter side is resized to the input's
        side divided by the crop share, and the centre is cut out, as timm does for evaluation on 8-bit images.
        """
        low, high = self.data.range
        x_BCHW = ((images.float() - low) / (high - low)).expand(-1, len(self.spec.mean), -1, -1)
        height, width = self.spec.image_size
        wanted = zip((height, width), x_BCHW.shape[2:], strict=True)
        scale = max(Fraction(int(side / self.spec.crop), old) for side, old in wanted)
        size = [int(scale * old) for old in x_BCHW.shape[2:]]
        if size != list(x_BCHW.shape[2:]):
            smooth = (
                {}
                if self.spec.interpolation == "nearest"
                else {"antialias": True, "align_corners": False}
            )
            x_BCHW = F.interpolate(x_BCHW, size, mode=self.spec.interpolation, **smooth).clamp(0, 1)
        top, left = round((x_BCHW.shape[2] - height) / 2), round((x_BCHW.shape[3] - width) / 2)
        x_BCHW = x_BCHW[:, :, top : top + height, left : left + width]
        mean, std = (
            torch.tensor(part, device=x_BCHW.device)[:, None, None]
            for part in (self.spec.mean, self.spec.std)
        )
        return (x_BCHW - mean) / std

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of this encoder."""
        return _weights(self.net)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], spec: TimmSpec, data: DataSpec
    ) -> "TimmEncoder":
        """Rebuild the encoder from tensors loaded against `timm_specs`."""
        net = _build(spec.model, len(spec.mean), spec.image_size)
        net.load_state_dict(dict(net.state_dict()) | dict(tensors))
        return cls(net, spec, data)

    @classmethod
    def from_file(
        cls, model: str, weights: Path, data: DataSpec, image_size: tuple[int, int] | None = None
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
            remedy = "Convert it once: load it with weights_only=True, write it with safetensors.torch.save_file."
            got = (
                f"a file with the ending {weights.suffix}"
                if weights.suffix
                else "a name without an ending"
            )
            raise SetupError(str(weights), expected="a .safetensors file", got=got, remedy=remedy)
        found = read_header(weights, max_bytes=MAX_FILE_BYTES)
        channels = _input_channels(model, found, data)
        net = _build(model, channels, None)
        wanted = {name: spec_of(tensor) for name, tensor in _weights(net).items()}
        missing = sorted(name for name, spec in wanted.items() if found.get(name) != spec)
        if missing:
            got = f"a file in which {len(missing)} of {len(wanted)} tensors differ or are missing, first {missing[0]}"
            raise SetupError(str(weights), expected=f"the weights of {model}", got=got)
        loaded = load_tensors(weights, found, max_bytes=MAX_FILE_BYTES, max_abs=None)
        net.load_state_dict(dict(net.state_dict()) | {name: loaded[name] for name in wanted})
        own_size = _own_size(net)
        # of a transformer: resamples its position embeddings
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
        cls, model: str, data: DataSpec, seed: int, image_size: tuple[int, int] | None = None
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
            expected = (
                "an encoder of volumes, such as pca, since networks of timm take images (C, H, W)"
            )
            raise SetupError(
                "recipe, encoder.kind",
                expected=expected,
                got=f"timm for data.shape {self.data.shape}",
            )
        try:
            blank = torch.full((1, *self.data.shape), self.data.range[0])
            features = self.net.forward_features(self.prepare(blank))  # type: ignore[operator]
            features = self.net.forward_head(features, pre_logits=True)  # type: ignore[operator]
            if tuple(features.shape) != (1, self.dim):
                raise ValueError(
                    f"features of shape {tuple(features.shape[1:])} in place of {self.dim} values"
                )
        # timm and torch raise all kinds of errors, for each network another one
        except Exception as error:
            if image_size is not None:
                raise _wrong_size(self.net, self.spec.model, image_size, own_size, error) from error
            raise SetupError(
                "recipe, encoder.model",
                expected="a network of timm that turns an image into one row of features",
                got=f"{self.spec.model}, which fails: {_one_line(error)}",
                remedy="Choose another network, or set encoder.image_size to a size that it takes.",
            ) from error


def timm_specs(spec: TimmSpec) -> dict[str, TensorSpec]:
    """Return the names, dtypes and shapes of a stored encoder.

    Raises:
        SetupError: the installed timm has no such network.
    """
    with torch.device("meta"):
        net = _build(spec.model, len(spec.mean), spec.image_size)
    return {name: spec_of(tensor) for name, tensor in _weights(net).items()}


def timm_bytes(spec: TimmSpec) -> int:
    """Return the bytes of everything that the network holds once it is built, weights and computed tables.

    Raises:
        SetupError: the installed timm has no such network.
    """
    with torch.device("meta"):
        net = _build(spec.model, len(spec.mean), spec.image_size)
    return sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))


def _build(model: str, channels: int, image_size: tuple[int, int] | None) -> nn.Module:
    """Build a network without its classifier; the input's size is passed to networks that take it."""
    options: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    if image_size is None:
        return create_model(model, **options)
    try:
        return create_model(model, img_size=tuple(image_size), **options)
    except SetupError:  # convolutions take any size
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
        height, width = (
            max(1, -(-side // patch)) * patch
            for side, patch in zip(image_size, patches, strict=True)
        )
        expected += f": multiples of its patch of {patches[0]} x {patches[1]} pixels"
        if (height, width) != tuple(image_size):
            remedy = f"Set it to [{height}, {width}], or leave it out for the network's own size, {list(own_size)}."
    got = f"{list(image_size)}, with which it fails: {_one_line(error)}"
    return SetupError("recipe, encoder.image_size", expected=expected, got=got, remedy=remedy)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _spec(
    net: nn.Module, model: str, weights: str, image_size: tuple[int, int] | None, channels: int
) -> TimmSpec:
    """Return timm's data config of this network as a plan states it."""
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(net)
    if config.get("crop_mode", "center") != "center":
        got = f"{model} with crop mode {config['crop_mode']}"
        raise SetupError("encoder", expected="a network with crop mode center", got=got)
    mean, std = (tuple(float(value) for value in config[name]) for name in ("mean", "std"))
    if len(mean) != channels:
        mean, std = (tuple([sum(part) / len(part)] * channels) for part in (mean, std))
    size = tuple(image_size or config["input_size"][1:])
    return TimmSpec.model_validate(
        {
            "dim": int(getattr(net, "head_hidden_size", net.num_features)),  # type: ignore[arg-type]
            "model": model,
            "weights": weights,
            "image_size": size,
            "interpolation": config["interpolation"],
            "crop": 1.0 if image_size else float(config["crop_pct"]),
            "mean": mean,
            "std": std,
        }
    )


def _input_channels(model: str, found: Mapping[str, TensorSpec], data: DataSpec) -> int:
    """Return the number of channels that the file's first layer takes, after checking the images against it."""
    net = create_model(model, num_classes=0)
    first = net.pretrained_cfg["first_conv"]  # type: ignore[index]
    first = first if isinstance(first, str) else next(iter(first or ()), None)
    spec = found.get(f"{first}.weight")
    channels = spec.shape[1] if spec and len(spec.shape) == 4 else 3
    if data.shape[0] not in (1, channels):
        raise DataError(
            "images", expected=f"1 or {channels} channels, as {model} takes", got=str(data.shape[0])
        )
    return channels


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in net.state_dict().items() if not name.endswith(_COUNTERS)
    }


def import_torchvision() -> None:
    """Import torchvision; where its compiled part cannot be loaded, define the schemas of two operators.

    Only after the import has failed: where it succeeds, it defines them itself, and torch allows one definition only.
    """
    try:
        import_module("torchvision")
    except RuntimeError:
        if hasattr(torch.ops.torchvision, "nms"):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}{_NMS}")  # type: ignore[no-untyped-call]
        _schemas.append(library)  # a schema lives as long as its library
        import_module("torchvision")
