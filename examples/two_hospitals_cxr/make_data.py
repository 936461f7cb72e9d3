"""Lay two public sets of chest X-rays out as two hospitals and an aggregator would have them; nothing is prepared.

Hannover is a folder of PNG with a table: the silo gets copies of these files with a table of its own, without the
patients that become public. Guangzhou is PneumoniaMNIST's npz, whose part `train` the silo gets as one npz. Public are
pictures of the patients that were left out in Hannover, and of PneumoniaMNIST's part `val`.
"""

import argparse
import csv
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

# of Hannover's 71 patients; of Guangzhou's 524 images
NUM_PUBLIC_PATIENTS = 15
NUM_PUBLIC_IMAGES = 150
TABLE = "metadata.csv"


class InputError(Exception):
    """What the user named is not the data set."""


def make_data(hannover: Path, pneumonia: Path, out: Path, seed: int = 0) -> dict[str, int]:
    """Write hannover.csv with the folder hannover/, guangzhou.npz and public/; return how many images each has.

    Args:
        hannover: the folder with `metadata.csv` (columns `file` and `patient_id`) and the pictures that it names.
        pneumonia: PneumoniaMNIST, 28 x 28: an npz with `train_images` and `val_images`.
        out: where to write.
        seed: of the choice of what is public.

    Raises:
        InputError: one of them is not the data set.
    """
    rng = np.random.default_rng(seed)
    rows, (train, val) = _rows(hannover), _images(pneumonia)
    public = out / "public"
    public.mkdir(parents=True, exist_ok=True)

    patients = sorted({row["patient_id"] for row in rows})
    shown = set(rng.permutation(patients)[:NUM_PUBLIC_PATIENTS].tolist())
    for number, row in enumerate(row for row in rows if row["patient_id"] in shown):
        shutil.copyfile(hannover / row["file"], public / f"hannover-{number:03}.png")
    for number, pixels in enumerate(val[rng.permutation(len(val))[:NUM_PUBLIC_IMAGES]]):
        Image.fromarray(pixels).save(public / f"guangzhou-{number:03}.png")

    private = [row for row in rows if row["patient_id"] not in shown]
    for row in private:
        copy = out / "hannover" / row["file"]
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hannover / row["file"], copy)
    with (out / "hannover.csv").open("w", newline="", encoding="utf-8") as handle:
        table = csv.writer(handle)
        table.writerow(("path", "patient"))
        # A silo reads no file outside of its table's folder.
        table.writerows((f"hannover/{row['file']}", row["patient_id"]) for row in private)
    # The published file names no patients. Here each image stands for one: see "The unit" in README.md.
    np.savez(out / "guangzhou.npz", images=train, patients=np.arange(len(train)))
    return {
        "hannover": len(private),
        "guangzhou": len(train),
        "public": sum(1 for _ in public.iterdir()),
    }


def _rows(hannover: Path) -> list[dict[str, str]]:
    table = hannover / TABLE
    if not table.is_file():
        raise InputError(
            f"{hannover} holds no {TABLE}; name the folder of the Hannover images with --hannover."
        )
    with table.open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    if not rows or not {"file", "patient_id"} <= rows[0].keys():
        raise InputError(f"{table} has no columns file and patient_id.")
    if len({row["patient_id"] for row in rows}) <= NUM_PUBLIC_PATIENTS:
        raise InputError(
            f"{table} names no more than {NUM_PUBLIC_PATIENTS} patients, all of whom would become public."
        )
    return rows


def _images(pneumonia: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(pneumonia, allow_pickle=False) as archive:
            return archive["train_images"], archive["val_images"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{pneumonia} is no npz with train_images and val_images; name PneumoniaMNIST with --pneumonia."
        ) from error


def main() -> int:
    """Command line: --hannover FOLDER --pneumonia NPZ --out FOLDER [--seed N]."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hannover", type=Path, required=True, help=f"folder with {TABLE} and the pictures"
    )
    parser.add_argument(
        "--pneumonia", type=Path, required=True, help="PneumoniaMNIST, 28 x 28, npz"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        made = make_data(arguments.hannover, arguments.pneumonia, arguments.out, arguments.seed)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, size in made.items():
        print(f"{name:>10}  {size} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
