"""Writes the card of an exported folder: licence, origin, and how the folder is used."""

from pathlib import Path
from typing import Literal

from ddm.export.model import ExportedModel
from ddm.io.files import write_atomic
from ddm.pages.render import render

CARD_NAME = "README.md"

Form = Literal["diffusers", "onnx", "torch-export"]


def write_card(model: ExportedModel, form: Form, folder: Path, *, is_plain: bool = False) -> None:
    """Write `README.md`.

    Args:
        model: what was exported.
        form: the form in which it was exported.
        folder: the folder to write to.
        is_plain: whether diffusers alone opens the folder.
    """
    page = render(
        "ddm",
        "export.md.jinja",
        origin=model.origin,
        form=form,
        output=model.output,
        shape=model.shape,
        data=model.data,
        condition=model.condition,
        latent=model.latent_spec.kind,
        is_plain=is_plain,
    )
    write_atomic(folder / CARD_NAME, page.encode("utf-8"))
