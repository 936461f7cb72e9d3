"""A plan for benchmarks of training: the demo's expert, and placeholders for what training does not read."""

import json
from collections.abc import Sequence
from datetime import timedelta

from ddm.protocol.base import now_utc
from ddm.protocol.plan import Plan


def small_plan(shape: Sequence[int], num_steps: int) -> Plan:
    """Return a plan whose experts train for so many steps on images of this shape."""
    created = now_utc()
    silos = ["north"]
    names = ("centroids", "encoder", "sketch")
    document = {
        "format": "archipelago/plan/1",
        "root_digest": "f" * 64,
        "plan_id": "bench-00000001",
        "created_at": created.isoformat(),
        "expires_at": (created + timedelta(days=1)).isoformat(),
        "silos": silos,
        "agreed": {silo: {"images": 1024, "patients": None} for silo in silos},
        "licence": "CC-BY-4.0",
        "receipt_key": "ed25519:" + "b" * 64,
        "files": [
            {"path": f"plan/{name}.safetensors", "bytes": 8448, "digest": "a" * 64}
            for name in names
        ],
        "data": {"shape": list(shape), "range": [-1.0, 1.0]},
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
                "num_steps": num_steps,
                "batch_size": 64,
                "learning_rate": 0.002,
                "weight_decay": 0.01,
                "ema_decay": 0.995,
                "precision": "fp32",
            },
            "dp_sgd": None,
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
    return Plan.parse(json.dumps(document).encode(), subject="plan")
