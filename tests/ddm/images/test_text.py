"""Burned-in text: what is suspected of text that is drawn here, and what is not suspected of images without any."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from ddm.images import text, text_reader
from ddm.images.text import ValueRange, strongest_line, suspect_text
from ddm.images.text_reader import reads_letters
from tests.support.case import case
from tests.support.dicom_files import waves

needs_tesseract = pytest.mark.skipif(
    shutil.which("tesseract") is None, reason="tesseract is not installed"
)


def body(side: int) -> Image.Image:
    """A smooth image with grain, between 60 and 150."""
    smooth = Image.fromarray(waves((32, 32), high=90, dtype=np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    grain = np.random.default_rng(side).normal(60, 2, (side, side))
    return Image.fromarray((np.asarray(smooth) + grain).astype(np.uint8))


def written(
    image: Image.Image, words: str, place: tuple[int, int], size: int, fill: int
) -> np.ndarray:
    copy = image.copy()
    ImageDraw.Draw(copy).text(place, words, fill=fill, font=ImageFont.load_default(size))
    return np.asarray(copy)[None]


def test_dates_names_and_numbers_of_any_size_are_suspected_in_images_of_any_size() -> None:
    for side, sizes in (
        (128, (7, 9, 12, 20)),
        (256, (8, 16, 32)),
        (512, (8, 24, 60)),
        (1024, (9, 40, 150)),
    ):
        image = body(side)
        for size in sizes:
            for words in ("12.03.1961", "DOE^JOHN", "1987-04-30", "Nowak"):
                if ImageFont.load_default(size).getlength(words) > side - 8:
                    continue
                with case(side=side, size=size, words=words):
                    assert suspect_text(written(image, words, (4, side // 3), size, 255))
                    assert suspect_text(written(image, words, (4, 2), size, 0))


def test_faint_letters_are_suspected() -> None:
    for side, size in ((128, 10), (512, 16)):
        image = body(side)
        values = written(image, "12.03.1961", (5, side // 2), size, 0)
        mask = (
            written(Image.new("L", image.size, 0), "12.03.1961", (5, side // 2), size, 255)[0]
            / 255.0
        )
        for step in (60, 40):
            faint = (np.asarray(image) + step * mask).astype(np.uint8)[None]
            with case(side=side, step=step):
                assert faint.max() < 255 and suspect_text(faint)
        assert suspect_text(values)


def test_text_is_suspected_in_every_type_of_values_and_in_colours() -> None:
    values = written(body(256), "12.03.1961", (20, 60), 14, 255)
    plain = np.asarray(body(256))[None]
    for dtype, scale, offset in (
        (np.uint16, 16, 0),
        (np.uint16, 256, 0),
        (np.int16, 10, -1024),
        (np.int32, 1 << 20, -5),
        (np.float32, 1e-3, 0.5),
    ):
        with case(dtype=dtype, scale=scale):
            assert suspect_text((values * np.float64(scale) + offset).astype(dtype))
            assert not suspect_text((plain * np.float64(scale) + offset).astype(dtype))
    colours = np.repeat(np.asarray(body(256))[None], 3, 0)
    assert not suspect_text(colours)
    for channel in range(3):
        coloured = colours.copy()
        coloured[channel] = values[0]
        with case(channel=channel):
            assert suspect_text(coloured)


def test_a_line_is_found_where_it_was_drawn() -> None:
    values = written(body(512), "12.03.1961", (200, 300), 30, 255)
    line = strongest_line(values[0], ValueRange.of(values[0]))
    assert line is not None
    middle_row = line.top + line.height / 2
    assert 300 < middle_row < 340 and 190 < line.left < 380 and 14 <= line.height <= 40


def test_lines_that_are_turned_by_a_quarter_are_suspected() -> None:
    values = written(body(512), "DOE JOHN 12.03.1961", (40, 30), 20, 255)
    for turns in (1, 3):
        with case(turns=turns):
            assert suspect_text(np.ascontiguousarray(np.rot90(values, turns, (1, 2))))


def test_a_single_letter_that_marks_a_side_is_not_suspected() -> None:
    for side, sizes in ((128, (10, 16)), (512, (16, 40))):
        for size in sizes:
            for letter in ("L", "R"):
                with case(side=side, size=size, letter=letter):
                    assert not suspect_text(
                        written(body(side), letter, (side - 2 * size, 6), size, 255)
                    )


def test_noise_edges_stripes_and_boards_are_not_suspected() -> None:
    rng = np.random.default_rng(0)
    images = {"flat": np.full((128, 128), 7, np.uint8), "body": np.asarray(body(256))}
    for side in (64, 128, 256):
        images[f"uniform {side}"] = rng.integers(0, 256, (side, side), dtype=np.uint8)
        images[f"normal {side}"] = rng.normal(128, 25, (side, side)).clip(0, 255).astype(np.uint8)
        images[f"speckle {side}"] = rng.exponential(40, (side, side)).clip(0, 255).astype(np.uint8)
        images[f"sparse {side}"] = ((rng.random((side, side)) < 0.02) * 255).astype(np.uint8)
    rows, columns = np.mgrid[:256, :256]
    images["stripes"] = (columns // 3 % 2 * 255).astype(np.uint8)
    images["rows"] = (rows // 3 % 2 * 255).astype(np.uint8)
    images["board"] = ((rows // 8 + columns // 8) % 2 * 255).astype(np.uint8)
    images["disc"] = ((rows - 128) ** 2 + (columns - 128) ** 2 < 90**2).astype(np.uint8) * 200
    images["frame"] = ((rows > 40) & (rows < 200) & (columns > 30) & (columns < 220)).astype(
        np.uint8
    ) * 200
    for name, image in images.items():
        with case(name):
            assert not suspect_text(image[None])


def test_a_few_hot_pixels_hide_no_text() -> None:
    values = written(body(512), "12.03.1961", (30, 99), 20, 255)[0].astype(np.uint16) * 10
    assert suspect_text(values[None])
    values[3, 3] = values[6, 400] = 65535
    assert suspect_text(values[None])
    values[300, 8] = 0
    assert suspect_text(values[None])


def test_one_line_on_an_empty_image_is_suspected() -> None:
    for side in (64, 128, 512):
        for row in range(20, 26):  # of which some are sampled
            with case(side=side, row=row):
                assert suspect_text(
                    written(Image.new("L", (side, side), 0), "1.3.1961", (2, row), 7, 255)
                )


def test_images_too_small_for_text_are_not_searched() -> None:
    assert not suspect_text(written(Image.new("L", (400, 47), 0), "12.03.1961", (5, 5), 20, 255))
    assert suspect_text(written(Image.new("L", (400, 48), 0), "12.03.1961", (5, 5), 20, 255))


@needs_tesseract
def test_tesseract_reads_words_in_part_of_an_image_and_none_in_anatomy() -> None:
    values = written(body(512), "DOE JOHN 1961", (100, 200), 30, 255)[0]
    assert reads_letters(values, 205, 150, 24, 60)
    assert reads_letters(255 - values, 205, 150, 24, 60)
    assert not reads_letters(values, 400, 150, 24, 60)
    assert not reads_letters(values[::-1], 205, 150, 24, 60)


@needs_tesseract
def test_tesseract_runs_within_the_bounds_of_a_decoder(tmp_path: Path) -> None:
    np.save(tmp_path / "values.npy", written(body(512), "DOE JOHN 1961", (100, 200), 30, 255)[0])
    program = f"""
import resource, sys
import numpy as np
from ddm.images.picture import DecodeLimits
from ddm.images.text_reader import reads_letters
from ddm.images.worker import set_bounds
values = np.load({str(tmp_path / "values.npy")!r})
set_bounds(DecodeLimits(memory_bytes=512 << 20))
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (0, 0)
sys.exit(0 if reads_letters(values, 205, 150, 24, 60) else 3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def fake_reader(folder: Path, script: str) -> str:
    path = folder / "tesseract"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_a_reader_that_hangs_fails_or_prints_nonsense_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_reader, "_SECONDS", 1)
    values = np.asarray(body(128))
    word = r"printf '5\t1\t1\t1\t1\t1\t0\t0\t9\t9\t%s\t%s\n'"
    for script, reads in (
        (f"{word} 95.5 JOHN", True),
        (f"{word} 59.9 JOHN", False),
        (f"{word} 95.5 'J.^.'", False),
        (f"{word} nan JOHN", False),
        ("printf 'JOHN JOHN'", False),
        (r"printf '\377\376\t\t'", False),
        ("exit 1", False),
        ("exec sleep 600", False),
    ):
        program = fake_reader(tmp_path, script)
        monkeypatch.setattr(text_reader, "reader_path", lambda program=program: program)
        with case(script=script):
            assert reads_letters(values, 40, 40, 10, 30) is reads
    monkeypatch.setattr(text_reader, "reader_path", lambda: str(tmp_path / "gone"))
    assert not reads_letters(values, 40, 40, 10, 30)
    monkeypatch.setattr(text_reader, "reader_path", lambda: None)
    assert not reads_letters(values, 40, 40, 10, 30)


def test_a_reader_can_write_no_file_and_has_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says by its word what its bounds are."""
    out = tmp_path / "out"
    program = fake_reader(
        tmp_path, f'[ "$(ulimit -f)" = 0 ] && [ "$(ulimit -v)" = {1 << 20} ] && echo x > {out}'
    )
    monkeypatch.setattr(text_reader, "reader_path", lambda: program)
    reads_letters(np.asarray(body(128)), 40, 40, 10, 30)
    # the shell opened it, so that its bounds were these, and could write nothing
    assert out.stat().st_size == 0


def test_a_doubtful_turned_line_is_suspected_where_a_word_is_read_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = written(body(512), "DOE JOHN 12.03.1961", (40, 30), 20, 255)
    turned = np.ascontiguousarray(np.rot90(values, 1, (1, 2)))
    monkeypatch.setattr(text, "_SUSPICIOUS_TURNED_EDGES", 99.0)
    monkeypatch.setattr(text, "reads_letters", lambda *part: False)
    assert not text._suspect_turned_line(turned[0], ValueRange.of(turned[0]))
    monkeypatch.setattr(text, "reads_letters", lambda *part: True)
    assert text._suspect_turned_line(turned[0], ValueRange.of(turned[0]))
    monkeypatch.setattr(text, "_SUSPICIOUS_EDGES", 99.0)
    assert not text._suspect_turned_line(turned[0], ValueRange.of(turned[0]))


@needs_tesseract
def test_turned_words_are_read_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    values = written(body(512), "JOHN JOHN JOHN JOHN JOHN", (40, 30), 30, 255)
    monkeypatch.setattr(text, "_SUSPICIOUS_TURNED_EDGES", 99.0)
    for turns in (1, 3):
        with case(turns=turns):
            assert text._suspect_turned_line(np.rot90(values[0], turns), ValueRange.of(values[0]))


def test_limits_of_this_process_stay_what_they_are() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    reads_letters(np.asarray(body(128)), 40, 40, 10, 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before and os.getpid() > 0
