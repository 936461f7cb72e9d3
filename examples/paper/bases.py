"""Makes files of grey images, 28 x 28 pixels, from which the public base of table 11 can learn.

    python -m examples.paper.bases hannover --data FOLDER --out hannover.npz
    python -m examples.paper.bases photographs --out photographs.npz

Hannover is the folder of chest X-rays that examples/two_hospitals_cxr/README.md names. The photographs are the two of
scikit-learn; each image is a square of one, of random place and size.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

SIDE = 28
NUM_SQUARES = 5000


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=("hannover", "photographs"))
    parser.add_argument("--data", type=Path, help="folder of the Hannover images")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.kind == "photographs":
        images = squares_of_photographs(NUM_SQUARES)
    elif arguments.data is None:
        parser.error("hannover needs --data FOLDER")
    else:
        images = pictures_in(arguments.data)
    if not len(images):
        parser.error(f"--data: no PNG in {arguments.data}")
    np.savez(arguments.out, images=images, labels=np.zeros(len(images), dtype=np.int64))
    print(f"{len(images)} images: {arguments.out}")
    return 0


def pictures_in(folder: Path) -> NDArray[np.uint8]:
    """Return the PNG files in a folder and below, cut to squares, shape (N, 28, 28)."""
    pictures = [Image.open(path) for path in sorted(folder.rglob("*.png"))]
    return _stacked(pictures)


def squares_of_photographs(num: int) -> NDArray[np.uint8]:
    """Return random squares of scikit-learn's photographs, shape (num, 28, 28).

    Args:
        num: how many.
    """
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random = np.random.default_rng(0)
    squares = []
    for number in range(num):
        photograph = photographs[number % len(photographs)]
        side = int(random.integers(SIDE, min(photograph.size) + 1))
        left = int(random.integers(0, photograph.width - side + 1))
        top = int(random.integers(0, photograph.height - side + 1))
        squares.append(photograph.crop((left, top, left + side, top + side)))
    return _stacked(squares)


def _stacked(pictures: Sequence[Image.Image]) -> NDArray[np.uint8]:
    images = [ImageOps.fit(picture.convert("L"), (SIDE, SIDE)) for picture in pictures]
    return np.array([np.asarray(image) for image in images], dtype=np.uint8)


if __name__ == "__main__":
    sys.exit(main())
