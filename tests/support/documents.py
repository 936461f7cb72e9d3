"""Documents as an honest sender would write them, as plain dicts that a test may spoil."""

import json
from datetime import timedelta
from typing import Any

from ddm.protocol.base import now_utc

AGREED = {"images": 1024, "patients": 1024}


def plan_document(**changes: object) -> dict[str, Any]:
    """The plan of the reference, for one silo called north."""
    created = now_utc()
    files = [
        {"path": f"plan/{name}.safetensors", "bytes": 8448, "digest": "a" * 64}
        for name in ("centroids", "encoder", "sketch")
    ]
    document: dict[str, Any] = {
        "format": "archipelago/plan/1",
        "root_digest": "f" * 64,
        "plan_id": "digits-3f9a1c2e",
        "created_at": created.isoformat(),
        "expires_at": (created + timedelta(days=90)).isoformat(),
        "silos": ["east", "north", "west"],
        "licence": "CC-BY-4.0",
        "receipt_key": "ed25519:" + "b" * 64,
        "files": files,
        "data": {"shape": [1, 8, 8], "range": [-1.0, 1.0]},
        "latent": {"kind": "identity"},
        "encoder": {"kind": "pca", "path": "plan/encoder.safetensors", "dim": 32},
        "clustering": {
            "path": "plan/centroids.safetensors",
            "num_fine": 64,
            "num_coarse": 3,
            "balanced": False,
        },
        "sketch": {"path": "plan/sketch.safetensors", "rank": 32},
        "partition": {"kind": "silo", "min_images": 50},
        "objective": {"path": "linear", "prediction": "velocity"},
        "t_distribution": {"kind": "uniform"},
        "condition": {"kind": "none"},
        "expert": {
            "architecture": {"kind": "dit", "patch": 2, "hidden": 96, "depth": 4, "heads": 4},
            "adaptation": {"kind": "full"},
            "dtype": "float32",
            "training": {
                "num_steps": 1500,
                "batch_size": 64,
                "learning_rate": 0.002,
                "schedule": "constant",
                "warmup_steps": 100,
                "betas": [0.9, 0.999],
                "weight_decay": 0.01,
                "max_gradient_norm": 1.0,
                "ema_decay": 0.995,
                "loss_weighting": "none",
                "order": "drawn",
                "precision": "fp32",
                "seed": 0,
            },
        },
        "statistics": {
            "unit": "image",
            "relation": "replace_one",
            "total": {"epsilon": 8.0, "delta": 1e-5},
            "counts": {"epsilon": 1.0, "num_groups": 32},
            "sketch": {"epsilon": 7.0, "delta": 1e-5, "rank": 8},
            "class_counts": None,
        },
        "router": {"kind": "learned", "hidden": 128, "depth": 3, "num_steps": 2000},
        "audit": {
            "required": True,
            "min_holdout_units": 300,
            "max_near_copy_rate": 0.01,
            "max_mia_auc": 0.6,
        },
        "limits": {
            "expert_bytes": 67108864,
            "statistic_bytes": 16777216,
            "train_s": 3600,
            "gpu_hours": 1.0,
        },
    }
    document |= changes
    return {"agreed": dict.fromkeys(document["silos"], AGREED)} | document


def to_bytes(document: dict[str, Any]) -> bytes:
    """As JSON."""
    return json.dumps(document).encode()


def base_document(digest: str, **changes: object) -> dict[str, Any]:
    """What a plan states of a base whose file has this digest."""
    document = {
        "digest": digest,
        "origin": {"kind": "file", "digest": digest},
        "licence": "CC0-1.0",
        "num_images": 1000,
    }
    return document | changes
