"""What a plan may say of latents; what was written before means what it meant, byte for byte."""

import json
from typing import Any

import pytest

from ddm.errors import DocumentError
from ddm.protocol.latent import AutoencoderKlLatent, IdentityLatent
from ddm.protocol.plan import Plan
from tests.support.documents import plan_document, to_bytes

AUTOENCODER: dict[str, Any] = {
    "kind": "autoencoder_kl",
    "path": "plan/autoencoder.safetensors",
    "channels": [32, 64, 64],
    "attention": [False, False, True],
    "latent_channels": 4,
    "num_res_blocks": 1,
    "norm_groups": 32,
    "scale": 0.7,
}
LISTED = {"path": "plan/autoencoder.safetensors", "bytes": 99, "digest": "c" * 64}
DIT = {"kind": "dit", "patch": 2, "hidden": 96, "depth": 4, "heads": 4}


def document(latent: dict[str, Any], side: int = 32, **expert: Any) -> dict[str, Any]:
    plan = plan_document(latent=latent, data={"shape": [1, side, side], "range": [-1.0, 1.0]})
    architecture = {"architecture": DIT | expert}
    listed = [LISTED] if latent["kind"] != "identity" else []
    return plan | {"files": [*plan["files"], *listed], "expert": plan["expert"] | architecture}


def parse(*arguments: Any, **expert: Any) -> Plan:
    return Plan.parse(to_bytes(document(*arguments, **expert)), subject="plan")


def test_plan_on_pixels_is_written_as_before() -> None:
    plan = Plan.parse(to_bytes(plan_document()), subject="plan")
    assert isinstance(plan.latent, IdentityLatent)
    assert json.loads(plan.encode())["latent"] == {"kind": "identity"}
    assert plan.expert_shape == plan.data.shape == (1, 8, 8)


def test_plan_with_an_autoencoder_survives_writing_and_says_what_experts_see() -> None:
    plan = parse(AUTOENCODER)
    assert Plan.parse(plan.encode(), subject="plan") == plan
    assert json.loads(plan.encode())["latent"] == AUTOENCODER
    assert plan.expert_shape == (4, 8, 8)
    assert isinstance(plan.latent, AutoencoderKlLatent)
    assert (plan.latent.levels, plan.latent.downsampling) == (3, 4)
    assert plan.latent.shape((1, 8, 16, 32)) == (4, 2, 4, 8)


def test_architecture_is_held_to_the_latents_and_not_to_the_pixels() -> None:
    assert parse(AUTOENCODER, patch=8).expert_shape == (4, 8, 8)
    with pytest.raises(DocumentError, match="patch"):
        parse(AUTOENCODER, patch=16)
    assert parse({"kind": "identity"}, patch=16).expert_shape == (1, 32, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "plan/other.safetensors"}, "must be listed"),
        ({"channels": [32, 48, 64]}, "norm_groups"),
        ({"attention": [False, True]}, "attention"),
        ({"scale": 0.0}, "greater"),
        ({"latent_channels": 0}, "greater"),
        ({"kind": "vq"}, "unknown kind"),
        ({"channels": [32] * 7, "attention": [False] * 7}, "multiples of 64"),
    ],
    ids=["file not listed", "groups", "levels", "scale", "channels", "kind", "too many levels"],
)
def test_latents_that_no_autoencoder_could_have_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        parse(AUTOENCODER | changes)
