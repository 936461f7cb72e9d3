"""Which networks a plan may name, for which samples and conditions; what was written before means what it meant."""

import json
from typing import Any

import pytest

from ddm.errors import DocumentError
from ddm.protocol.architecture import ClassCondition, Dit, Mmdit, NoCondition, TextCondition, Unet
from ddm.protocol.plan import Plan
from tests.support.case import case
from tests.support.documents import plan_document, to_bytes

SIZES = {"patch": 2, "hidden": 96, "depth": 4, "heads": 4, "position_grid": None}
DIT = SIZES | {"kind": "dit", "qk_norm": False}
MMDIT = SIZES | {"kind": "mmdit", "shared_depth": 1}
UNET = {
    "kind": "unet",
    "channels": [32, 64],
    "attention": [False, True],
    "num_res_blocks": 1,
    "head_channels": 32,
    "norm_groups": 16,
}
CLASSES = {"kind": "class", "num_classes": 10, "drop": 0.2, "names": []}
TEXT = {"kind": "text", "dim": 16, "max_tokens": 8, "drop": 0.1, "encoder": None}
NONE = {"kind": "none"}
VOLUME = [1, 8, 8, 4]
SAMPLES = {
    "kind": "samples",
    "patch": 2,
    "hidden": 8,
    "depth": 1,
    "heads": 2,
    "num_steps": 5,
    "images_per_expert": 9,
}
TIMM = {"kind": "timm", "dim": 8, "model": "net", "image_size": [8, 8], "mean": [0.5], "std": [0.5]}


def document(
    architecture: dict[str, Any], condition: dict[str, Any], shape: list[int], **more: Any
) -> dict[str, Any]:
    plan = plan_document(condition=condition, data={"shape": shape, "range": [-1.0, 1.0]}, **more)
    return plan | {"expert": plan["expert"] | {"architecture": architecture}}


def parse(*arguments: Any, **more: Any) -> Plan:
    return Plan.parse(to_bytes(document(*arguments, **more)), subject="plan")


def test_every_architecture_survives_encoding() -> None:
    for architecture, condition, shape, kinds in [
        (DIT, NONE, [1, 8, 8], (Dit, NoCondition)),
        (DIT, CLASSES, [1, 8, 8], (Dit, ClassCondition)),
        (DIT, TEXT, [1, 8, 8], (Dit, TextCondition)),
        (MMDIT, TEXT, [1, 8, 8], (Mmdit, TextCondition)),
        (UNET, NONE, [1, 8, 8], (Unet, NoCondition)),
        (UNET, CLASSES, VOLUME, (Unet, ClassCondition)),
    ]:
        with case(architecture=architecture, condition=condition, shape=shape, kinds=kinds):
            plan = parse(architecture, condition, shape)
            assert (type(plan.expert.architecture), type(plan.condition)) == kinds
            assert Plan.parse(plan.encode(), subject="plan.json") == plan
            written = json.loads(plan.encode())
            assert written["expert"]["architecture"].items() >= architecture.items()
            assert written["condition"]["kind"] == condition["kind"]
            assert written["data"]["shape"] == shape


def test_architecture_that_cannot_be_built_is_refused_in_the_plan() -> None:
    for architecture, condition, shape, message in [
        (DIT, NONE, VOLUME, "unet"),
        (MMDIT, TEXT, VOLUME, "unet"),
        (DIT, NONE, [1, 7, 8], "divides"),
        (MMDIT, TEXT, [1, 8, 7], "divides"),
        (MMDIT, NONE, [1, 8, 8], "use the architecture dit"),
        (MMDIT, CLASSES, [1, 8, 8], "use the architecture dit"),
        (UNET, NONE, [1, 8, 8, 7], "multiples of 2"),
        (UNET, NONE, [1, 8], "data.shape"),
        (UNET, NONE, [1, 8, 8, 8, 8], "data.shape"),
        (UNET | {"attention": [True]}, NONE, [1, 8, 8], "attention"),
        (UNET | {"channels": [32, 40]}, NONE, [1, 8, 8], "norm_groups"),
        (UNET | {"channels": [32, 48]}, NONE, [1, 8, 8], "head_channels"),
        (MMDIT | {"shared_depth": 5}, TEXT, [1, 8, 8], "shared_depth"),
        (DIT | {"shared_depth": 0}, NONE, [1, 8, 8], "architecture"),
        (DIT | {"kind": "cnn"}, NONE, [1, 8, 8], "unknown kind"),
        (DIT, CLASSES | {"num_classes": 1}, [1, 8, 8], "num_classes"),
        (DIT, CLASSES | {"drop": 1.0}, [1, 8, 8], "drop"),
        (DIT, TEXT | {"dim": 0}, [1, 8, 8], "dim"),
        (DIT, TEXT | {"max_tokens": 10**6}, [1, 8, 8], "max_tokens"),
    ]:
        with case(architecture, condition, shape), pytest.raises(DocumentError, match=message):
            parse(architecture, condition, shape)


def test_routers_and_encoders_that_see_images_alone_are_refused_for_volumes() -> None:
    for more, message in (({"router": SAMPLES}, "samples"), ({"encoder": TIMM}, "timm")):
        assert parse(UNET, NONE, [1, 8, 8], **more)
        with pytest.raises(DocumentError, match=message):
            parse(UNET, NONE, VOLUME, **more)
