"""Trains the small classifier whose features the tables of FID use, on labelled public images, and says how good it is.

    python -m examples.paper.classifier --data public.npz --out classifier.safetensors

The npz holds `images` and `labels`. A tenth of the images is held out, and the share of them whose class is found is
printed with the file's digest. The same images and seed give the same file on the same machine.
"""

import argparse
from pathlib import Path

import torch

from ddm.evaluation.classifier import train_classifier
from ddm.images.array_files import read_images
from ddm.images.npz import read_array
from ddm.protocol.base import sha256_file
from ddm.protocol.data import DataSpec
from ddm.system.console import progress, say

_HELD_OUT = 10  # one in
_MAX_LABEL_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="npz of labelled public images")
    parser.add_argument("--out", type=Path, required=True, help="FILE.safetensors")
    parser.add_argument(
        "--range",
        type=float,
        nargs=2,
        default=(-1.0, 1.0),
        help="range of values of the plan; default: -1 1",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=1500,
        help="number of training steps, of 128 images each; default: 1500",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and shifts")
    arguments = parser.parse_args()
    labels = torch.from_numpy(
        read_array(arguments.data, "labels", max_bytes=_MAX_LABEL_BYTES)
    ).long()
    shape = read_array(arguments.data, "images", max_bytes=1 << 40).shape[1:]
    data = DataSpec(shape=shape if len(shape) == 3 else (1, *shape), range=tuple(arguments.range))
    images = read_images(arguments.data, data)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(arguments.seed))
    held = order[: len(order) // _HELD_OUT]
    kept = order[len(order) // _HELD_OUT :]
    with progress(f"training on {len(kept)} images") as report_progress:
        classifier = train_classifier(
            images[kept],
            labels[kept],
            data,
            num_steps=arguments.steps,
            seed=arguments.seed,
            on_progress=report_progress,
        )
    classifier.save(arguments.out)
    right = classifier.accuracy(images[held], labels[held])
    say(
        f"{arguments.out}: sha256 {sha256_file(arguments.out)}, {right:.1%} of {len(held)} held-out images right"
    )


if __name__ == "__main__":
    main()
