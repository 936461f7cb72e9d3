"""Networks and pipelines for diffusers, where it has none of its own. A release or a folder contains no code.

An exported folder names these classes by this module, and diffusers imports it from the installed package. Importing it
imports diffusers, which takes seconds.
"""

# Shape legend: B batch, N samples, L text tokens, D width of a text token, ... all data dimensions.
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import diffusers
import torch
from diffusers import ConfigMixin, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from pydantic import TypeAdapter
from torch import Tensor

from ddm.diffusion.solver import uniform_times
from ddm.encoders.autoencoder import build_autoencoder
from ddm.encoders.public_autoencoder import PublicAutoencoder, build_public_autoencoder
from ddm.ensemble import Ensemble
from ddm.errors import SetupError
from ddm.loading.ensemble import open_ensemble
from ddm.models.network import build_network
from ddm.protocol.architecture import Architecture, Condition
from ddm.protocol.latent import AutoencoderKlLatent, DiffusersKlLatent, LatentSpec
from ddm.sampling.options import SamplingOptions

# diffusers numbers times from 0 to 1000.
TIME_SCALE = 1000


class ExpertModel(ModelMixin, ConfigMixin):  # type: ignore[misc] # diffusers has no types
    """Any network of ours, called as diffusers calls its own.

    Args:
        architecture: its document, as JSON.
        condition: the document of its condition, as JSON.
        in_channels: channels of a sample.
        sample_size: sides of a sample.

    Raises:
        ValueError: a document that is not one (pydantic's error).
        ShapeError: the architecture does not fit the shape or the condition.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        architecture: dict[str, Any],
        condition: dict[str, Any],
        in_channels: int,
        sample_size: Sequence[int],
    ) -> None:
        super().__init__()
        documents: TypeAdapter[Any] = TypeAdapter(Architecture)
        conditions: TypeAdapter[Any] = TypeAdapter(Condition)
        self.network = build_network(
            documents.validate_json(json.dumps(architecture)),
            (in_channels, *sample_size),
            conditions.validate_json(json.dumps(condition)),
        )

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        class_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
    ) -> UNet2DOutput:
        """Return the velocity.

        Args:
            sample: shape (B, ...).
            timestep: 1000 t, one number or (B,).
            class_labels: 0 for no class, c + 1 for class c, int64 (B,).
            encoder_hidden_states: text tokens (B, L, D).
        """
        t_B = (timestep / TIME_SCALE).to(sample).expand(sample.shape[0])
        condition = encoder_hidden_states
        if class_labels is not None:
            condition = class_labels - 1
        if condition is None:
            return UNet2DOutput(sample=self.network(sample, t_B))
        return UNet2DOutput(sample=self.network(sample, t_B, condition))


class LatentDecoder(ModelMixin, ConfigMixin):  # type: ignore[misc] # diffusers has no types
    """The autoencoder that decodes an expert's latents.

    Args:
        latent: the document of the latent space, as JSON.
        shape: the shape of one decoded sample.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, latent: dict[str, Any], shape: Sequence[int]) -> None:
        super().__init__()
        documents: TypeAdapter[Any] = TypeAdapter(LatentSpec)
        spec = documents.validate_json(json.dumps(latent))
        match spec:
            case AutoencoderKlLatent(scale=scale):
                self.autoencoder = build_autoencoder(spec, tuple(shape))
                self.scale = scale
            case DiffusersKlLatent():
                network = build_public_autoencoder(spec, tuple(shape))
                self.autoencoder = PublicAutoencoder(network, spec)
                # It scales latents itself.
                self.scale = 1.0
            case _:
                raise SetupError(
                    "decoder, latent", expected="an autoencoder", got=f"the kind {spec.kind}"
                )

    def forward(self, latents: Tensor) -> Tensor:
        """Return samples, about in the data's range."""
        decode = cast(Any, self.autoencoder).decode
        samples: Tensor = decode(latents * self.scale)
        return samples


class ExpertPipeline(DiffusionPipeline):  # type: ignore[misc] # diffusers has no types
    """Draws samples from one exported network with Euler's steps, evenly spaced in t.

    Args:
        network: an `ExpertModel`, or a `UNet2DModel`.
        scheduler: diffusers' own, of flow matching.
        decoder: decodes latents; None for networks on pixels.
        condition: the kind of condition: none, class or text.
        low: the least value of a sample.
        high: the largest.
    """

    _optional_components = ["decoder"]
    model_cpu_offload_seq = "network->decoder"

    def __init__(
        self,
        network: ModelMixin,
        scheduler: FlowMatchEulerDiscreteScheduler,
        decoder: LatentDecoder | None = None,
        condition: str = "none",
        low: float = -1.0,
        high: float = 1.0,
    ) -> None:
        super().__init__()
        self.register_modules(network=network, scheduler=scheduler, decoder=decoder)
        self.register_to_config(condition=condition, low=low, high=high)

    @torch.no_grad()
    def __call__(
        self,
        num_images: int = 1,
        num_inference_steps: int = 25,
        condition: Tensor | None = None,
        guidance_scale: float = 0.0,
        latents: Tensor | None = None,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Draw images.

        Args:
            num_images: N.
            num_inference_steps: the number of inference steps of Euler's solver.
            condition: classes, int64 (N,), of which -1 is none, or texts (N, L, D); None for no condition.
            guidance_scale: g of ``(1 + g) u(x | c) - g u(x)``; 0 is no guidance, as in `ddm sample-student`.
            latents: noise to begin with, shape (N, ...), in place of random noise.
            generator: the generator of the noise.
            output_type: `pil`; `np`, values from 0 to 1 with channels last; or `pt`, as the network draws them.
        """
        sides = self.network.config.sample_size
        shape = (num_images, self.network.config.in_channels, *sides)
        x_B = latents
        if x_B is None:
            noise = torch.randn(shape, generator=generator)
            x_B = noise.to(self.device, self.network.dtype)
        times = uniform_times(num_inference_steps)
        self.scheduler.set_timesteps(sigmas=list(times[:-1]), device=x_B.device)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            u_B = self._velocity(x_B, timestep, condition)
            if guidance_scale:
                unconditional_B = self._velocity(x_B, timestep, None)
                u_B = (1 + guidance_scale) * u_B - guidance_scale * unconditional_B
            x_B = self.scheduler.step(u_B, timestep, x_B).prev_sample
        if self.decoder is not None:
            x_B = self.decoder(x_B)
        value_range = (self.config.low, self.config.high)
        return ImagePipelineOutput(images=_in_form(x_B, value_range, output_type))

    def _velocity(self, x_B: Tensor, timestep: Tensor, condition: Tensor | None) -> Tensor:
        keywords = {}
        if self.config.condition == "class":
            if condition is None:
                condition = torch.full((len(x_B),), -1)
            # Row 0 of the table of classes is no class.
            keywords["class_labels"] = condition.to(x_B.device) + 1
        elif condition is not None:
            keywords["encoder_hidden_states"] = condition.to(x_B.device)
        velocity: Tensor = self.network(x_B, timestep, **keywords).sample
        return velocity


class EnsemblePipeline(DiffusionPipeline):  # type: ignore[misc] # diffusers has no types
    """A verified release as a pipeline; there is no other way to one than `from_release`, which verifies.

    Args:
        ensemble: the ensemble of the verified release.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    @classmethod
    def from_release(
        cls, release: Path | str, *, root: Path | str | bytes, **keywords: Any
    ) -> "EnsemblePipeline":
        """Verify a release and load it.

        Args:
            release: its folder.
            root: the pinned root of trust, obtained out of band.
            keywords: the others of `ddm.open_ensemble`, such as `state` and `silo_keys`.

        Raises:
            TrustError, FormatError, MemoryLimitError: see `ddm.open_ensemble`.
        """
        return cls(open_ensemble(release, root=root, **keywords))

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse to load what nobody verified.

        Raises:
            SetupError: always.
        """
        raise SetupError(
            "EnsemblePipeline",
            expected="a published release and its root of trust",
            got="a folder without a signature",
            remedy="Call EnsemblePipeline.from_release(RELEASE, root=FILE).",
        )

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to write a copy without signatures.

        Raises:
            SetupError: always.
        """
        raise SetupError(
            "EnsemblePipeline",
            expected="the published release, which is signed",
            got="a request for a copy without its signatures",
            remedy="Copy the release's folder, and call EnsemblePipeline.from_release on the copy.",
        )

    def __call__(
        self,
        num_images: int = 1,
        num_inference_steps: int = 25,
        *,
        output_type: str = "pil",
        options: SamplingOptions = SamplingOptions(),
        **keywords: Any,
    ) -> ImagePipelineOutput:
        """Draw images.

        Args:
            num_images: N.
            num_inference_steps: the number of inference steps of the solver.
            output_type: as of `ExpertPipeline`.
            options: the solver, noise to begin with, and more.
            keywords: others of `ddm.Ensemble.sample`: strategy, seed, condition, guidance, prior.
        """
        drawn = self.ensemble.sample(
            num_images, steps=num_inference_steps, options=options, **keywords
        )
        images = _in_form(drawn.images, self.ensemble.value_range, output_type)
        return ImagePipelineOutput(images=images)


def _in_form(images: Tensor, value_range: tuple[float, float], output_type: str) -> Any:
    """Return images in the form that a caller asked for.

    Raises:
        SetupError: an unknown form, or a picture of a volume.
    """
    if output_type == "pt":
        return images
    is_picture = images.dim() == 4 and images.shape[1] in (1, 3)
    if output_type not in ("np", "pil") or (output_type == "pil" and not is_picture):
        raise SetupError(
            "output_type",
            expected="pt, np, or pil for images of 1 or 3 channels",
            got=f"{output_type!r} for samples of shape {tuple(images.shape[1:])}",
        )
    low, high = value_range
    shares = ((images - low) / (high - low)).clamp(0, 1)
    array = shares.movedim(1, -1).cpu().float().numpy()
    if output_type == "np":
        return array
    return DiffusionPipeline.numpy_to_pil(array)


# `DiffusionPipeline.from_pretrained` looks a folder's pipeline up by its name among the attributes of diffusers.
diffusers.ExpertPipeline = ExpertPipeline
