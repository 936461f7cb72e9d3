"""The space that experts work in: samples themselves, or their latents under a frozen public AutoencoderKL.

Clustering uses features of pixels, and samples are decoded at the end; everything in between, the experts, the routers
and the sketches, works on latents. A sample's latent is the mean of the autoencoder's posterior, not a draw from it, so
it is unique; it is divided by the plan's `scale`, so that the experts' data have about the variance of their noise. The
autoencoder is one of MONAI, or a published one of diffusers (`ddm.encoders.public_autoencoder`).
"""

# Shape legend: N samples, B samples of one block, ... sample dimensions (C, H, W) or (C, D, H, W).

from collections.abc import Callable, Mapping
from copy import copy
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, assert_never

import torch
from torch import Tensor, nn

from ddm.encoders.non_finite import replace_non_finite
from ddm.errors import NumericalError, ShapeError
from ddm.io.array_input import real_tensor
from ddm.io.tensors import load_tensors, spec_of
from ddm.protocol.base import File
from ddm.protocol.latent import (
    Autoencoder,
    AutoencoderKlLatent,
    AutoencoderSize,
    DiffusersKlLatent,
    IdentityLatent,
    LatentSpec,
)
from ddm.system.devices import device_named
from ddm.system.monai import monai_networks
from ddm.system.progress import ProgressCallback

if TYPE_CHECKING:
    from ddm.encoders.public_autoencoder import PublicAutoencoder

MAX_FILE_BYTES = 8 * 1024**3
MAX_WEIGHT = 1e4
# Bytes of the widest layer's output for one block, and most samples in it.
_BLOCK_BYTES = 1 << 26
_MAX_BLOCK = 64


class Latent(Protocol):
    """Encodes samples into the experts' space, and decodes them."""

    def encode(
        self,
        samples: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return the latents of samples, shape (N, ...), float32 on the CPU.

        Args:
            samples: shape (N, ...).
            on_progress: called with (completed, total).
            replacement: every value of a latent that has values that are not finite; None refuses such a latent.
        """
        ...

    def decode(
        self,
        latents: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return the samples of latents, shape (N, ...), float32 on the CPU.

        Args:
            latents: shape (N, ...).
            on_progress: called with (completed, total).
            replacement: every value of a sample that has values that are not finite; None refuses such a sample.
        """
        ...


class Identity:
    """Experts work on the samples themselves."""

    def encode(
        self,
        samples: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return the samples, not a copy of them."""
        return samples

    def decode(
        self,
        latents: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return the samples, not a copy of them."""
        return latents


class AutoencoderKl:
    """A frozen autoencoder.

    Every block has the same number of samples, padded with the last one, so that a sample's latent does not depend on
    the number of others. Computes on a GPU where there is one.

    Args:
        net: MONAI's network, from `build_autoencoder`, or a published one, which scales latents itself.
        size: its sizes.
        shape: one sample, (C, H, W) or (C, D, H, W).
        scale: the divisor of latents.
    """

    def __init__(
        self,
        net: "nn.Module | PublicAutoencoder",
        size: AutoencoderSize | DiffusersKlLatent,
        shape: tuple[int, ...],
        scale: float = 1.0,
    ) -> None:
        self.net = net.eval().requires_grad_(False)
        self.size = size
        self.shape = shape
        self.scale = scale
        self.device = device_named()
        # The first layer works at full resolution, in float32: its output is the largest.
        first_layer_bytes = 4 * size.channels[0] * prod(size.at_once(shape)[1:])
        self.block = max(1, min(_MAX_BLOCK, _BLOCK_BYTES // first_layer_bytes))

    def for_single_samples(self) -> "AutoencoderKl":
        """Return it for blocks of one sample, so that no bit of what it returns depends on another sample's place."""
        single = copy(self)
        single.block = 1
        return single

    def encode(
        self,
        samples: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return latents over `scale`, shape (N, latent channels, ...), float32 on the CPU.

        Args:
            samples: shape (N, ...), in the plan's range.
            on_progress: called with samples done and samples in all; an exception that it raises stops the encoding.
            replacement: every value of a latent that has values that are not finite; None refuses such a latent.

        Raises:
            DataError: samples that are not real numbers.
            ShapeError: samples of another shape than the plan's.
            NumericalError: latents that are not finite.
        """
        samples = real_tensor(samples, "images")
        latents = torch.empty(len(samples), *self.size.shape(self.shape))
        self.encode_into(samples, latents, on_progress, replacement=replacement)
        return latents

    def encode_into(
        self,
        samples: Tensor,
        target: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> None:
        """Write latents into the caller's tensor, which may be mapped from a file; see `encode`."""
        self._blocks(
            lambda x_B: self.net.encode(x_B)[0] / self.scale,  # type: ignore[operator]
            samples,
            self.shape,
            target,
            on_progress,
            replacement,
        )

    def decode(
        self,
        latents: Tensor,
        on_progress: ProgressCallback | None = None,
        *,
        replacement: float | None = None,
    ) -> Tensor:
        """Return samples, shape (N, ...), float32 on the CPU, about in the plan's range but not clipped to it.

        Args:
            latents: latents over `scale`, shape (N, latent channels, ...).
            on_progress: see `encode`.
            replacement: every value of a sample that has values that are not finite; None refuses such a sample.

        Raises:
            ShapeError: latents of another shape.
            NumericalError: samples that are not finite.
        """
        samples = torch.empty(len(latents), *self.shape)
        latent_shape = self.size.shape(self.shape)
        self._blocks(
            lambda z_B: self.net.decode(z_B * self.scale),  # type: ignore[operator]
            latents,
            latent_shape,
            samples,
            on_progress,
            replacement,
        )
        return samples

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan stores of the autoencoder."""
        return dict(self.net.state_dict())

    @torch.inference_mode()
    def _blocks(
        self,
        call: Callable[[Tensor], Tensor],
        inputs: Tensor,
        shape: tuple[int, ...],
        target: Tensor,
        on_progress: ProgressCallback | None,
        replacement: float | None,
    ) -> None:
        """Write what `call` makes of inputs of one shape into `target`, block by block."""
        input_shape = tuple(inputs.shape[1:])
        if input_shape != shape:
            raise ShapeError("autoencoder's input", expected=str(shape), got=str(input_shape))
        self.net.to(self.device)
        for start in range(0, len(inputs), self.block):
            stop = min(start + self.block, len(inputs))
            num = stop - start
            x_B = inputs[start:stop].to(self.device, torch.float32)
            padding = x_B[-1:].expand(self.block - num, *shape)
            outputs = call(torch.cat([x_B, padding]))[:num]
            target[start:stop] = replace_non_finite(outputs.float().cpu(), replacement, _not_finite)
            if on_progress:
                on_progress(stop, len(inputs))


def _not_finite() -> NumericalError:
    return NumericalError(
        "autoencoder's output",
        expected="finite numbers",
        got="NaN or infinity",
        remedy="Check the weights of the autoencoder: they are damaged, or need float32.",
    )


def build_autoencoder(
    size: AutoencoderSize,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
) -> nn.Module:
    """Build a MONAI AutoencoderKL with seeded weights; the caller's random state is left as it was.

    Raises:
        ShapeError: sides that its levels cannot halve.
        SetupError: MONAI is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(size, shape)


def empty_autoencoder(latent: Autoencoder, shape: tuple[int, ...]) -> nn.Module:
    """Build a plan's autoencoder on the meta device, without memory for its weights.

    Raises:
        ShapeError: sides that its levels cannot halve.
        SetupError: the library that builds it, MONAI or diffusers, is not installed.
    """
    if isinstance(latent, DiffusersKlLatent):
        # Imported late: diffusers takes seconds, and most plans do without.
        from ddm.encoders.public_autoencoder import build_public_autoencoder

        with torch.device("meta"):
            return build_public_autoencoder(latent, shape)
    with torch.device("meta"):
        return _build(latent, shape)


def open_latent(
    spec: LatentSpec,
    shape: tuple[int, ...],
    file: File | None,
    folder: Path,
) -> Latent:
    """Open a plan's latent space.

    Args:
        spec: the plan's `latent`.
        shape: one sample, in pixels.
        file: the autoencoder's weights as the plan lists them; None for the identity.
        folder: holds `plan/`.

    Raises:
        DigestError: the weights differ from those that the plan lists.
        TensorFileError: the weights are not what the plan's sizes imply, or exceed `MAX_WEIGHT`.
        ShapeError, SetupError: see `build_autoencoder`.
    """
    max_bytes = MAX_FILE_BYTES
    digest = None
    if file is not None:
        max_bytes = file.bytes
        digest = file.digest
    match spec:
        case IdentityLatent():
            return Identity()
        case AutoencoderKlLatent(path=path, scale=scale):
            return _open(folder / path, spec, shape, scale, max_bytes, digest)
        case DiffusersKlLatent(path=path):
            return open_published(folder / path, spec, shape, max_bytes=max_bytes, digest=digest)
        case _:
            assert_never(spec)


def open_published(
    path: Path,
    spec: DiffusersKlLatent,
    shape: tuple[int, ...],
    *,
    max_bytes: int,
    digest: str | None,
) -> AutoencoderKl:
    """Open a published autoencoder; see `ddm.encoders.public_autoencoder.load_public_autoencoder`."""
    # Imported late: diffusers takes seconds, and most plans do without.
    from ddm.encoders.public_autoencoder import load_public_autoencoder

    net = load_public_autoencoder(
        path, spec, shape, max_bytes=max_bytes, max_abs=MAX_WEIGHT, digest=digest
    )
    return AutoencoderKl(net, spec, shape)


def open_weights(
    path: Path,
    size: AutoencoderSize,
    shape: tuple[int, ...],
) -> AutoencoderKl:
    """Open an autoencoder's weights from a local file without a known digest, at scale 1.

    Raises:
        TensorFileError, ShapeError, SetupError: see `open_latent`.
    """
    return _open(path, size, shape, 1.0, MAX_FILE_BYTES, None)


def spread(latents: Tensor) -> float:
    """Return the standard deviation of latents about their mean, over all samples, channels and positions.

    Raises:
        NumericalError: it is 0 or not a number: all latents are equal, or there are too few.
    """
    deviation = float(latents.double().std())
    if not deviation > 0:
        raise NumericalError(
            "latents",
            expected="latents with a standard deviation above 0",
            got=f"{deviation:g} over {len(latents)} samples",
            remedy="Give the autoencoder images that differ.",
        )
    return deviation


def _open(
    path: Path,
    size: AutoencoderSize,
    shape: tuple[int, ...],
    scale: float,
    max_bytes: int,
    digest: str | None,
) -> AutoencoderKl:
    # Shapes alone: a file of other tensors is refused before memory for weights is taken.
    with torch.device("meta"):
        net = _build(size, shape)
    specs = {name: spec_of(tensor) for name, tensor in net.state_dict().items()}
    tensors: Mapping[str, Tensor] = load_tensors(
        path, specs, max_bytes=max_bytes, max_abs=MAX_WEIGHT, digest=digest
    )
    # Assigned, since the network's own tensors have no memory to copy into.
    net.load_state_dict(dict(tensors), assign=True)
    return AutoencoderKl(net, size, shape, scale)


def _build(size: AutoencoderSize, shape: tuple[int, ...]) -> nn.Module:
    misfit = size.misfit(shape)
    if misfit:
        raise ShapeError("autoencoder", expected=misfit, got=str(shape))
    innermost = size.attention[-1]
    net: nn.Module = monai_networks("latent autoencoder_kl").AutoencoderKL(
        spatial_dims=len(shape) - 1,
        in_channels=shape[0],
        out_channels=shape[0],
        num_res_blocks=size.num_res_blocks,
        channels=size.channels,
        attention_levels=size.attention,
        latent_channels=size.latent_channels,
        norm_num_groups=size.norm_groups,
        with_encoder_nonlocal_attn=innermost,
        with_decoder_nonlocal_attn=innermost,
        use_flash_attention=True,
    )
    return net
