"""The cohort on disk: written once and whole, found again, read as every other source, in bounded memory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddm.errors import DataError, DiskError
from ddm.images.array_files import open_images
from ddm.images.store import Item, store_cohort
from ddm.images.transform import Transform
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import Slices, TransformSpec
from silo.data.cohort import Cohort
from tests.support.case import case
from tests.support.cohorts import cohort_at
from tests.support.errors import has_subject
from tests.support.forked import fork_process, wait_for_exit

DATA = DataSpec(shape=(1, 4, 4), range=(-1.0, 1.0))
TRANSFORM = Transform(TransformSpec(storage="uint8"), DATA)


def sample(number: int) -> np.ndarray:
    return np.random.default_rng(number).uniform(-1, 1, DATA.shape).astype(np.float32)


def items(num: int) -> Iterator[Item]:
    """Two samples of each picture, two pictures of each patient."""
    for number in range(num):
        pair = (sample(2 * number), sample(2 * number + 1))
        yield Item(
            pair, patient=f" P{9 - number // 2}", label=number % 3, caption=f"picture {number}"
        )


def never() -> Iterator[Item]:
    raise AssertionError("decoded again")
    yield


def test_a_cohort_is_written_once_and_read_back_with_what_belongs_to_each_row(
    tmp_path: Path,
) -> None:
    stored = store_cohort(tmp_path, ["inputs"], TRANSFORM, items(5), max_images=12)
    assert stored.row == (np.dtype(np.uint8), (1, 4, 4)) and len(stored) == 10
    assert stored.column("patients", 8).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert stored.column("labels", 8).tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert stored.column("captions", 64).tolist()[-1] == "picture 4"
    images = open_images(stored, DATA, tmp_path)
    wanted = np.stack([sample(number) for number in range(10)])
    assert np.abs(images[:].numpy() - wanted).max() <= 1 / 255 + 1e-6
    assert sorted(path.suffix for path in tmp_path.glob("unpacked-*")) == [".npy", ".parquet"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert np.array_equal(np.load(next(tmp_path.glob("*.npy"))), TRANSFORM.stored(wanted))
    again = store_cohort(tmp_path, ["inputs"], TRANSFORM, never(), max_images=12)
    assert np.array_equal(again.in_place().read(range(10)), stored.in_place().read(range(10)))


def test_no_identifier_of_a_patient_reaches_the_disk(tmp_path: Path) -> None:
    secret = "DOE^JANE 1961-03-14"
    store_cohort(
        tmp_path,
        [],
        TRANSFORM,
        (Item((sample(n),), patient=secret) for n in range(3)),
        max_images=3,
    )
    assert not any(b"DOE" in path.read_bytes() for path in tmp_path.iterdir())


def test_other_inputs_or_another_transform_make_the_cohort_anew_and_remove_the_old_one(
    tmp_path: Path,
) -> None:
    store_cohort(tmp_path, ["a"], TRANSFORM, items(3), max_images=6)
    before = set(tmp_path.glob("unpacked-*"))
    (tmp_path / "state.json").touch()
    for inputs, transform in ((["b"], TRANSFORM), (["b"], Transform(TransformSpec(), DATA))):
        with case(inputs=inputs), pytest.raises(AssertionError, match="decoded again"):
            store_cohort(tmp_path, inputs, transform, never(), max_images=6)
    assert {path.name for path in tmp_path.iterdir()} == {
        "state.json",
        ".unpacking.lock",
    } and before


def test_what_is_incomplete_empty_or_more_than_announced_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    one = (sample(0),)
    for cohort_items, most, words in (
        ([], 4, "at least one"),
        ([Item(())], 4, "at least one"),
        ([Item(one)] * 5, 4, "at most 4"),
        ([Item(one, patient="a"), Item(one)], 4, "patients"),
        ([Item(one), Item(one, label=1)], 4, "labels"),
        ([Item(one, patient="a"), Item(one, patient=" NaN ")], 4, "patients"),
    ):
        with case(words=words), pytest.raises(DataError, match=words):
            store_cohort(tmp_path, [], TRANSFORM, cohort_items, max_images=most)
        assert [path.name for path in tmp_path.iterdir()] == [".unpacking.lock"]
    stored = store_cohort(tmp_path, [], TRANSFORM, [Item(one)], max_images=1)
    with pytest.raises(DataError, check=has_subject("patients")):
        stored.column("patients", 8)


def test_room_is_looked_for_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ddm.io.space.os.statvfs", lambda folder: SimpleNamespace(f_bavail=10, f_frsize=4096)
    )
    with pytest.raises(DiskError, match="transformed images"):
        store_cohort(tmp_path, [], TRANSFORM, never(), max_images=100)


def killed_at(number: int) -> Iterator[Item]:
    for place, item in enumerate(items(number + 1)):
        if place == number:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item


def test_a_process_killed_in_the_middle_leaves_no_cohort_and_the_next_one_is_whole(
    tmp_path: Path,
) -> None:
    pid = fork_process(
        lambda: store_cohort(tmp_path, ["inputs"], TRANSFORM, killed_at(4500), max_images=10_000)
    )
    assert wait_for_exit(pid) == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()} - {".unpacking.lock"}
    assert left and all(name.startswith(".unpacked-") and name.endswith(".part") for name in left)
    stored = store_cohort(tmp_path, ["inputs"], TRANSFORM, items(50), max_images=100)
    assert len(stored) == 100 and len(list(tmp_path.glob("unpacked-*"))) == 2
    table = next(tmp_path.glob("*.parquet"))
    array = next(tmp_path.glob("*.npy"))
    array.unlink()  # as a crash between the two leaves it: the table alone
    assert (
        len(
            store_cohort(tmp_path, ["inputs"], TRANSFORM, items(3), max_images=100).column(
                "labels", 8
            )
        )
        == 6
    )
    assert table.exists()


def load(path: Path, folder: Path, spec: TransformSpec, **request: object) -> Cohort:
    plain = {"unit": "image", "num_classes": None}
    return cohort_at(
        path, DATA, min_images=1, salt=b"s", folder=folder, transform=spec, **(plain | request)
    )


def stamps(folder: Path) -> list[int]:
    """When each file of a cohort was last changed; the scan beside it keeps books of its own."""
    return [file.stat().st_mtime_ns for file in sorted(folder.iterdir()) if file.is_file()]


def test_a_silo_takes_every_picture_through_the_plans_transform_once(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 9, 12), np.uint8)
    path = tmp_path / "a.npz"
    np.savez(
        path,
        images=pixels,
        patients=np.array(["b", "a", "b", "c", "c", "a"]),
        labels=np.arange(6) % 2,
    )
    spec = TransformSpec(channels="grey")
    cohort = load(path, tmp_path / "private", spec, unit="patient", num_classes=2)
    assert cohort.images.shape == (6, 1, 4, 4) and cohort.unit_N.tolist() == [0, 1, 0, 2, 2, 1]
    assert cohort.label_N.tolist() == [0, 1, 0, 1, 0, 1] and cohort.num_units == 3
    stamp = stamps(tmp_path / "private")
    again = load(path, tmp_path / "private", spec, unit="patient", num_classes=2)
    assert again.digest == cohort.digest
    assert stamp == stamps(tmp_path / "private")
    other = load(path, tmp_path / "private", TransformSpec(channels="grey", storage="uint8"))
    assert other.digest != cohort.digest
    # three channels, and the plan has one
    blank = load(path, tmp_path / "private", TransformSpec()).images[:]
    assert blank.shape == (6, 1, 4, 4) and bool((blank == blank.min()).all())
    with pytest.raises(DataError, check=has_subject("labels")):
        load(path, tmp_path / "private", spec, num_classes=1)


def test_slices_of_a_volume_belong_to_its_patient_and_have_its_class(tmp_path: Path) -> None:
    volumes = np.random.default_rng(0).integers(0, 999, (3, 1, 8, 6, 6)).astype(np.uint16)
    np.savez(
        tmp_path / "a.npz", images=volumes, patients=np.array([7, 8, 7]), labels=np.array([0, 1, 1])
    )
    spec = TransformSpec(slices=Slices(count=4, share=(0.25, 0.75)))
    cohort = load(tmp_path / "a.npz", tmp_path / "private", spec, unit="patient", num_classes=2)
    assert cohort.images.shape == (12, 1, 4, 4) and cohort.num_units == 2
    assert (
        cohort.unit_N.tolist() == [0] * 4 + [1] * 4 + [0] * 4
        and cohort.label_N.tolist() == [0] * 4 + [1] * 8
    )


MANY = """
import resource, sys
from pathlib import Path
import numpy as np
from ddm.images.transform import Transform
from ddm.protocol.data import DataSpec
from ddm.protocol.transform import TransformSpec
from ddm.images.store import Item, store_cohort

transform = Transform(TransformSpec(storage="uint8"), DataSpec(shape=(1, 64, 64), range=(-1.0, 1.0)))
image = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(1, 64, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items = (Item((image,), patient=f"P{n // 3}", label=n % 5, caption=f"finding {n}") for n in range(100_000))
found = store_cohort(Path(sys.argv[1]), [], transform, items, max_images=100_000)
print(len(found), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_a_hundred_thousand_images(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    num, grown_kib = map(int, finished.stdout.split())
    assert num == 100_000 and next(tmp_path.glob("*.npy")).stat().st_size > 390 << 20
    # of which pyarrow takes most; all images would be 391 MiB in their compact type
    assert grown_kib < 200 << 10
