"""Split scikit-learn's handwritten digits among a public set and three silos of unequal size and different labels."""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

NUM_PUBLIC = 400
NUM_EVALUATION = 150
SHARES = {"north": 0.6, "east": 0.3, "west": 0.1}
# How often each silo meets digits 0-9, before its size is applied: north mostly round ones, west hardly any.
LABELS = {
    "north": (8, 1, 6, 6, 2, 3, 8, 1, 8, 5),
    "east": (1, 8, 3, 1, 8, 2, 1, 8, 1, 4),
    "west": (1, 1, 1, 6, 1, 9, 1, 1, 2, 6),
}


def make_data(out: Path, seed: int) -> dict[str, int]:
    """Write public.npz, evaluation.npz and one npz a silo; return their sizes.

    Images are (N, 1, 8, 8) float32 in [-1, 1]. The evaluation images, with the silo each would have gone to, are for
    the demo's own table: no silo and no aggregator reads them.
    """
    digits = load_digits()
    images = (digits.images[:, None] / 8.0 - 1.0).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    public = order[:NUM_PUBLIC]
    rest = order[NUM_PUBLIC:]
    held_out = rest[:NUM_EVALUATION]
    private = rest[NUM_EVALUATION:]
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "public.npz", images=images[public])
    owner, owner_held_out = np.split(
        assign(digits.target[np.r_[private, held_out]], seed), [len(private)]
    )
    np.savez_compressed(out / "evaluation.npz", images=images[held_out], silo=owner_held_out)
    sizes = {"public": NUM_PUBLIC, "evaluation": NUM_EVALUATION}
    for index, silo in enumerate(SHARES):
        mine = private[owner == index]
        np.savez_compressed(out / f"{silo}.npz", images=images[mine], labels=digits.target[mine])
        sizes[silo] = len(mine)
    return sizes


def assign(labels: np.ndarray, seed: int) -> np.ndarray:
    """Give every private image an owner so that sizes come close to SHARES and label mixes to LABELS."""
    mixes = np.array([LABELS[silo] for silo in SHARES], dtype=float)
    weights = mixes / mixes.sum(1, keepdims=True) * np.array(list(SHARES.values()))[:, None]
    histogram = np.bincount(labels, minlength=10)
    # iterative proportional fitting: columns to the labels there are, rows to the shares
    for _ in range(200):
        weights *= histogram / weights.sum(0)
        weights *= (np.array(list(SHARES.values())) * len(labels) / weights.sum(1))[:, None]
    weights /= weights.sum(0)
    rng = np.random.default_rng(seed + 1)
    return np.array([rng.choice(len(SHARES), p=weights[:, label]) for label in labels])


def main() -> None:
    """Command line: --out FOLDER [--seed N]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, size in make_data(arguments.out, arguments.seed).items():
        print(f"{name:>10}  {size} images")


if __name__ == "__main__":
    main()
