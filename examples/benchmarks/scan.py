"""Scans made images: what `silo scan` takes, beside what pydicom alone takes on as many cores; processes start in both.

python examples/benchmarks/scan.py --small 60000 --dicom 2000 --processes 2
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, RLELossless, generate_uid

from silo.config import ImagesSettings
from silo.images.scan import scan
from silo.images.source import ImageSource


def make_small(folder: Path, num: int) -> None:
    """Write grey PNG files of 28 x 28 pixels, 1,000 a folder."""
    generator = np.random.default_rng(0)
    for number in range(num):
        place = folder / f"{number // 1000:03d}"
        place.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (28, 28), dtype=np.uint8)).save(
            place / f"{number:06d}.png"
        )


def make_dicom(folder: Path, num: int, *, packed: bool) -> None:
    """Write CT images of 512 x 512 values of 12 bits, uncompressed or in RLE."""
    generator = np.random.default_rng(0)
    rows = np.mgrid[:512, :512]
    for number in range(num):
        centre = generator.uniform(200, 312, 2)
        disc = 2000 * np.exp(-((rows[0] - centre[0]) ** 2 + (rows[1] - centre[1]) ** 2) / 2e4)
        values = (disc + generator.normal(0, 20, disc.shape) + 100).clip(0, 4095).astype(np.uint16)
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(number)])
        tags = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
        tags.SOPClassUID = CTImageStorage
        tags.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
        tags.PatientID = f"{number // 10:05d}"
        tags.Modality = "CT"
        tags.PixelSpacing = [0.7, 0.7]
        tags.BodyPartExamined = "CHEST"
        tags.Rows = 512
        tags.Columns = 512
        tags.SamplesPerPixel = 1
        tags.PhotometricInterpretation = "MONOCHROME2"
        tags.BitsAllocated = 16
        tags.BitsStored = 12
        tags.HighBit = 11
        tags.PixelRepresentation = 0
        tags.RescaleSlope = 1
        tags.RescaleIntercept = -1024
        tags.WindowCenter = 40
        tags.WindowWidth = 400
        tags.PixelData = values.tobytes()
        if packed:
            tags.compress(RLELossless, values, generate_instance_uid=False)
        tags.save_as(folder / f"{number:06d}.dcm", enforce_file_format=True)


def decode_alone(paths: list[Path]) -> int:
    """Decode files with pydicom, and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(pydicom.dcmread(path).pixel_array.size for path in paths)


@dataclass(frozen=True)
class ScanCost:
    """What something took: seconds on the clock, and of the processor in all processes."""

    clock_s: float
    processor_s: float

    def __str__(self) -> str:
        return f"{self.clock_s:.1f} s, {self.processor_s:.1f} s of processors"


def cost_of(work: Callable[[], object]) -> ScanCost:
    """Run something that ends the processes that it starts."""
    begun = time.perf_counter()
    before = sum(os.times()[:4])
    work()
    return ScanCost(time.perf_counter() - begun, sum(os.times()[:4]) - before)


def alone(folder: Path, processes: int) -> None:
    """Decode the files of a folder with pydicom in so many processes, which begin by importing it."""
    paths = sorted(folder.iterdir())
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(decode_alone, [paths[start::processes] for start in range(processes)]))


def scanned(data: Path, private: Path, processes: int, num: int) -> None:
    """Scan images, all of which are to be accepted."""
    summary = scan(ImageSource(data, private, ImagesSettings(processes=processes)))
    if summary.accepted != num:
        raise SystemExit(f"{summary.accepted} of {num} accepted: {dict(summary.reasons)}")


def main() -> None:
    """Measure, side by side in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=60_000)
    parser.add_argument("--dicom", type=int, default=2000)
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="number of rounds over the DICOM files, each with and without the scan",
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("small", "native", "rle"):
            (folder / kind).mkdir()
        if arguments.small:
            make_small(folder / "small", arguments.small)
            for title in ("first", "second"):
                cost = cost_of(
                    partial(
                        scanned,
                        folder / "small",
                        folder / "private-small",
                        arguments.processes,
                        arguments.small,
                    )
                )
                print(f"{title} scan of {arguments.small} PNG of 28 x 28: {cost}")
        for kind in ("native", "rle") if arguments.dicom else ():
            make_dicom(folder / kind, arguments.dicom, packed=kind == "rle")
            clocks = list[float]()
            processors = list[float]()
            # in turn, since other work on the machine slows both
            for number in range(arguments.rounds):
                private = folder / f"private-{kind}-{number}"
                pydicom_alone = cost_of(partial(alone, folder / kind, arguments.processes))
                cost = cost_of(
                    partial(scanned, folder / kind, private, arguments.processes, arguments.dicom)
                )
                clocks.append(pydicom_alone.clock_s / cost.clock_s)
                processors.append(pydicom_alone.processor_s / cost.processor_s)
                print(
                    f"{arguments.dicom} DICOM of 512 x 512, {kind}: scan {cost}; pydicom alone {pydicom_alone}; ",
                    end="",
                )
                print(f"ratio {clocks[-1]:.2f}, of processors {processors[-1]:.2f}", flush=True)
            print(
                f"median of {arguments.rounds}: ratio {median(clocks):.2f}, of processors {median(processors):.2f}"
            )


if __name__ == "__main__":
    main()
