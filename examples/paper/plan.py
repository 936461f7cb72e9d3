"""A plan for measurements without a federation: what they read as asked, all else arbitrary."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ddm.protocol.base import now_utc, sha256_hex
from ddm.protocol.plan import Plan

_UNTRAINED = {
    "architecture": {"kind": "dit", "patch": 2, "hidden": 4, "depth": 1, "heads": 2},
    "training": {
        "num_steps": 1,
        "batch_size": 1,
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "ema_decay": 0.0,
    },
}


def plan_for(
    shape: Sequence[int],
    statistics: Mapping[str, Any],
    *,
    expert: Mapping[str, Any] = _UNTRAINED,
    silos: Sequence[str] = ("north",),
    router: Mapping[str, Any] | None = None,
    num_groups: int = 1,
    rank: int = 1,
    **more: Any,
) -> Plan:
    """Return a complete plan.

    Args:
        shape: of an image, in [-1, 1].
        statistics: the table `statistics`.
        expert: the table `expert`; by default one that nobody trains. A base must be named.
        silos: their names.
        router: the table `router`; counts by default.
        num_groups: public groups.
        rank: of the sketch.
        more: other tables.
    """
    created = now_utc()
    digest = sha256_hex(b"")
    names = ["centroids", "encoder", "sketch"]
    base = None
    if "base" in expert.get("adaptation", {}):
        names.append("base")
        base = {
            "digest": digest,
            "origin": {"kind": "file", "digest": digest},
            "licence": "CC-BY-4.0",
        }
    document = {
        "root_digest": digest,
        "plan_id": "figure-00000000",
        "created_at": created.isoformat(),
        "expires_at": (created + timedelta(days=1)).isoformat(),
        "silos": list(silos),
        "agreed": {silo: {"images": 1 << 20} for silo in silos},
        "licence": "CC-BY-4.0",
        "receipt_key": f"ed25519:{digest}",
        "files": [
            {"path": f"plan/{name}.safetensors", "bytes": 1, "digest": digest} for name in names
        ],
        "data": {"shape": list(shape), "range": [-1.0, 1.0]},
        "latent": {"kind": "identity"},
        "encoder": {"kind": "pca", "dim": 1},
        "clustering": {"num_fine": num_groups, "num_coarse": 1},
        "sketch": {"rank": rank},
        "partition": {"kind": "silo", "min_images": 1},
        "objective": {},
        "t_distribution": {"kind": "logit_normal"},
        "condition": {"kind": "none"},
        "base": base,
        "expert": expert,
        "statistics": statistics,
        "router": router or {"kind": "counts"},
        "audit": {
            "required": True,
            "min_holdout_units": 1,
            "max_near_copy_rate": 0.0,
            "max_mia_auc": 0.5,
        },
        "limits": {"expert_bytes": 1, "statistic_bytes": 1 << 28, "train_s": 1, "gpu_hours": 0.0},
    }
    return Plan.model_validate_json(json.dumps(document | more))
