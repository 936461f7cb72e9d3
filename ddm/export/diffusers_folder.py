"""Writes a network as a folder that `DiffusionPipeline.from_pretrained` opens."""

import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from ddm.encoders.autoencoder import AutoencoderKl
from ddm.errors import SetupError
from ddm.export.model import ExportedExpert
from ddm.models.diffusers_weights import unet_settings, unet_tensors
from ddm.protocol.architecture import NoCondition, Unet
from ddm.protocol.latent import IdentityLatent

# The pipelines of diffusers write values of this range.
_DIFFUSERS_RANGE = (-1.0, 1.0)


def diffusers_classes() -> Any:
    """Import `ddm.export.diffusers_classes`, and diffusers with it.

    Raises:
        SetupError: diffusers is not installed.
    """
    # Before the import, which reads it: no server is asked for anything.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with warnings.catch_warnings():
            # Third-party imports warn.
            warnings.simplefilter("ignore")
            return import_module("ddm.export.diffusers_classes")
    except ImportError as error:
        raise SetupError(
            "--diffusers",
            expected="an installed diffusers",
            got="no module diffusers",
            remedy="Install it: in Archipelago's repository, pip install '.[diffusers]'.",
        ) from error


def check_velocity(model: ExportedExpert) -> None:
    """Refuse an expert whose answers are not velocities on the ensemble's path: diffusers has no such conversion.

    Raises:
        SetupError: names its objective.
    """
    if model.conversion is not None:
        objective = model.conversion
        raise SetupError(
            "--diffusers",
            expected="an expert that was trained for the velocity on the ensemble's path",
            got=f"one that was trained for {objective.prediction} on the path {objective.path}",
            remedy="Export it with --torch-export or --onnx, which contain the conversion.",
        )


def write_diffusers_folder(model: ExportedExpert, folder: Path) -> None:
    """Write the folder: plain classes of diffusers where they compute the same, else ours by their names.

    Raises:
        SetupError: the expert's answers are not velocities, or diffusers is not installed.
    """
    check_velocity(model)
    classes = diffusers_classes()
    network = _network(model, classes)
    scheduler = classes.FlowMatchEulerDiscreteScheduler()
    if _fits_ddpm_pipeline(model):
        # Of all its pipelines this one does nothing but call the network and the scheduler in turn.
        pipeline = classes.diffusers.DDPMPipeline(unet=network, scheduler=scheduler)
    else:
        low, high = model.data.range
        pipeline = classes.ExpertPipeline(
            network=network,
            scheduler=scheduler,
            decoder=_decoder(model, classes),
            condition=model.condition.kind,
            low=low,
            high=high,
        )
    pipeline.save_pretrained(folder)


def is_plain(model: ExportedExpert) -> bool:
    """Whether diffusers alone, without this toolkit, opens the folder."""
    return _is_plain_unet(model) and _fits_ddpm_pipeline(model)


def _fits_ddpm_pipeline(model: ExportedExpert) -> bool:
    is_unconditional = isinstance(model.condition, NoCondition)
    is_on_pixels = isinstance(model.latent_spec, IdentityLatent)
    is_picture = len(model.shape) == 3 and model.shape[0] in (1, 3)
    return is_unconditional and is_on_pixels and is_picture and model.data.range == _DIFFUSERS_RANGE


def _is_plain_unet(model: ExportedExpert) -> bool:
    """Whether a `UNet2DModel` computes the same: a U-Net of images, without a text."""
    return (
        isinstance(model.architecture, Unet)
        and len(model.shape) == 3
        and model.condition.kind != "text"
    )


def _network(model: ExportedExpert, classes: Any) -> Any:
    tensors = model.network.state_dict()
    if isinstance(model.architecture, Unet) and _is_plain_unet(model):
        settings = unet_settings(model.architecture, model.shape, model.condition)
        unet = classes.diffusers.UNet2DModel(**settings)
        unet.load_state_dict(unet_tensors(unet.state_dict(), tensors))
        return unet.eval()
    expert = classes.ExpertModel(
        architecture=model.architecture.model_dump(mode="json"),
        condition=model.condition.model_dump(mode="json"),
        in_channels=model.shape[0],
        sample_size=list(model.shape[1:]),
    )
    expert.network.load_state_dict(tensors)
    return expert.eval()


def _decoder(model: ExportedExpert, classes: Any) -> Any:
    if not isinstance(model.latent, AutoencoderKl):
        return None
    decoder = classes.LatentDecoder(
        latent=model.latent_spec.model_dump(mode="json"), shape=list(model.data.shape)
    )
    decoder.autoencoder.load_state_dict(model.latent.net.state_dict())
    return decoder.eval()
