"""Samples on disk: readable by others, and marked as synthetic with the digest of their release."""

import json
import sys
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from types import ModuleType

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from ddm.ensemble import Ensemble, Samples, SamplingOptions
from ddm.errors import DataError, MathError, SetupError, ShapeError
from ddm.images.samples import read_given_images, read_mask
from ddm.protocol.data import DataSpec
from tests.support.case import case
from tests.support.pictures import read_all_pictures

DIGEST = "ab" * 32


def samples(*shape: int, release: str = DIGEST) -> Samples:
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1)) * 2.2 - 1.1
    return Samples(images, torch.tensor([0, 1, 1]), 2, images, release=release)


def test_pictures_and_grid_bear_the_mark_and_the_pixels(tmp_path: Path) -> None:
    drawn = samples(1, 6, 5)
    assert drawn.save(tmp_path / "new" / "grid.png") == "a grid"
    assert drawn.save(str(tmp_path / "each")) == "3 PNG files"
    files = [tmp_path / "new" / "grid.png", *sorted((tmp_path / "each").iterdir())]
    assert [file.name for file in files] == ["grid.png", "00000.png", "00001.png", "00002.png"]
    for file in files:
        with Image.open(file) as picture:
            assert (picture.text["Synthetic"], picture.text["Release"]) == ("true", DIGEST)  # type: ignore[attr-defined]
    spec = DataSpec(shape=(1, 6, 5), range=(-1.0, 1.0))
    images = torch.cat([read_given_images(file, spec) for file in files[1:]])
    torch.testing.assert_close(images, drawn.images.clamp(-1, 1), atol=1 / 127, rtol=0)
    samples(3, 4, 4, release="").save(tmp_path / "colour")
    with Image.open(tmp_path / "colour" / "00001.png") as picture:
        assert "Release" not in picture.text and picture.text["Synthetic"] == "true"  # type: ignore[attr-defined]


def test_npz_bears_the_mark_and_the_numbers(tmp_path: Path) -> None:
    drawn = samples(2, 4, 4)
    assert drawn.save(tmp_path / "a.npz") == "float32 images in [-1, 1]"
    with np.load(tmp_path / "a.npz") as file:
        assert bool(file["synthetic"]) and str(file["release"]) == DIGEST
        np.testing.assert_array_equal(file["images"], drawn.images.clamp(-1, 1).numpy())
        assert file["expert"].tolist() == [0, 1, 1]
    first = (tmp_path / "a.npz").read_bytes()
    drawn.save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").read_bytes() == first


def test_values_are_clipped_to_the_range_of_the_data_whose_ends_are_black_and_white(
    tmp_path: Path,
) -> None:
    drawn = replace(
        samples(1, 8, 8),
        images=torch.linspace(-60, 315, 64).view(1, 1, 8, 8),
        value_range=(0.0, 255.0),
    )
    drawn = replace(drawn, expert_N=torch.tensor([0]))
    clipped = drawn.images[0, 0].clamp(0, 255)
    assert drawn.save(tmp_path / "a.npz") == "float32 images in [0, 255]"
    with np.load(tmp_path / "a.npz") as file:
        np.testing.assert_array_equal(file["images"][0, 0], clipped.numpy())
    drawn.save(tmp_path / "each")
    with Image.open(tmp_path / "each" / "00000.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture)[:, :, 0], clipped.round().numpy())
    volume = replace(drawn, images=drawn.images[:, :, None])
    volume.save(tmp_path / "a.nii")
    stored = np.asarray(nibabel.load(tmp_path / "a.nii").dataobj)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(stored[:, :, 0], clipped.T.numpy())


@pytest.mark.parametrize("channels", [1, 2])
def test_volumes_bear_the_mark_and_are_read_as_a_silo_reads_them(
    tmp_path: Path, channels: int
) -> None:
    drawn = samples(channels, 4, 5, 6)
    assert drawn.save(tmp_path / "folder") == "3 NIfTI files"
    assert (
        drawn.save(tmp_path / "all.nii.gz")
        == drawn.save(tmp_path / "all.nii")
        == "volumes in one file"
    )
    files = [
        *sorted((tmp_path / "folder").iterdir()),
        tmp_path / "all.nii.gz",
        tmp_path / "all.nii",
    ]
    for file in files:
        image = nibabel.load(file)
        assert bytes(image.header["descrip"]).rstrip(b"\0") == f"synthetic {DIGEST}".encode()  # type: ignore[attr-defined]
        (extension,) = image.header.extensions  # type: ignore[attr-defined]
        attributes = json.loads(extension.get_content())
        assert (attributes["Synthetic"], attributes["Release"]) == ("true", DIGEST)
    together = np.asarray(nibabel.load(files[-1]).dataobj)  # type: ignore[attr-defined]
    assert together.shape == (6, 5, 4, 3, channels)[: 4 if channels == 1 else 5]
    first = np.asarray(nibabel.load(files[0]).dataobj)  # type: ignore[attr-defined]
    own = together[:, :, :, 0]
    np.testing.assert_array_equal(first, own)
    np.testing.assert_array_equal(
        first[..., 0] if channels == 2 else first, drawn.images[0, 0].clamp(-1, 1).permute(2, 1, 0)
    )
    read = [
        torch.from_numpy(volume)
        for volume in (
            picture.values.astype(np.float32) for picture in read_all_pictures(tmp_path / "folder")
        )
    ]
    # values are stretched to the range in between
    for one, other in zip(read, drawn.images.clamp(-1, 1), strict=True):
        assert float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) > 0.999


def test_samples_are_counted_and_taken_apart_with_their_experts_and_classes() -> None:
    ensemble = Ensemble([lambda x, t: x - 1, lambda x, t: x + 1], None, [0.5, 0.5], shape=(1, 4, 4))
    drawn = replace(ensemble.sample(6, steps=2), classes=tuple("abcdef"))
    assert len(drawn) == 6 and len(list(drawn)) == 6
    last = drawn[-1]
    assert len(last) == 1 and last.classes == ("f",)
    torch.testing.assert_close(last.images[0], drawn.images[5], rtol=0, atol=0)
    assert last.provenance is not None and drawn.provenance is not None
    assert last.provenance[0] == drawn.provenance[5]
    chosen = drawn[[4, 1]]
    assert chosen.classes == ("e", "b")
    assert chosen.expert_N.tolist() == drawn.expert_N[[4, 1]].tolist()
    assert chosen.provenance is not None
    assert [chosen.provenance[0], chosen.provenance[1]] == [
        drawn.provenance[4],
        drawn.provenance[1],
    ]
    of_first = drawn[drawn.expert_N == 0]
    assert set(of_first.expert_N.tolist()) == {0}
    for wrong in (6, "a"):
        with pytest.raises(MathError) as caught:
            drawn[wrong]  # type: ignore[index]
        assert caught.value.subject == "samples"


def test_samples_are_pictures_where_they_have_one_or_three_channels() -> None:
    drawn = samples(1, 6, 5)
    opened = drawn.to_pil()
    assert [picture.size for picture in opened] == [(5, 6)] * 3
    expected = ((drawn.images[2, 0].clamp(-1, 1) + 1) * 127.5).round()
    np.testing.assert_array_equal(np.asarray(opened[2])[:, :, 0], expected.numpy())
    shown = drawn._repr_png_()
    assert shown is not None
    with Image.open(BytesIO(shown)) as notebook_picture:
        assert notebook_picture.width > 2 * 5
    for numbers in (samples(2, 6, 5), samples(7)):
        assert numbers._repr_png_() is None
        with pytest.raises(SetupError):
            numbers.to_pil()


def test_bar_is_shown_at_a_terminal_unless_it_is_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    ensemble = Ensemble([lambda x, t: x - 1], None, [1.0], shape=(2,))
    taken: list[tuple[int, int]] = []
    options = SamplingOptions(on_progress=lambda done, total: taken.append((done, total)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = {}
    for name, keywords in {
        "by default": {},
        "unwanted": {"progress": False},
        "reported otherwise": {"options": options},
    }.items():
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", terminal)
            ensemble.sample(3, steps=2, **keywords)  # type: ignore[arg-type]
        shown[name] = terminal.getvalue()
    assert "sampling" in shown["by default"]
    assert shown["unwanted"] == shown["reported otherwise"] == ""
    assert taken[-1] == (6, 6)


def test_bar_of_a_notebook_is_shown_where_sampling_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """IPython prints the bar's text where no notebook shows it."""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    ensemble = Ensemble([lambda x, t: x - 1], None, [1.0], shape=(2,))
    ensemble.sample(3, steps=2)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("ddm.sampling.progress._NOTEBOOK_REDRAW_S", 0.0)
    ensemble.sample(3, steps=2, progress=False)
    assert capsys.readouterr().out == ""
    ensemble.sample(3, steps=2)
    assert capsys.readouterr().out.splitlines()[-1].endswith("] 6/6")


@pytest.mark.parametrize(
    ("subject", "keywords"),
    [
        ("num", {"num": 2.0}),
        ("num", {"num": True}),
        ("num", {"num": 0}),
        ("steps", {"num": 2, "steps": 2.5}),
        ("seed", {"num": 2, "seed": None}),
        ("seed", {"num": 2, "seed": -1}),
        ("strategy", {"num": 2, "strategy": 3}),
    ],
)
def test_arguments_of_another_kind_are_named(subject: str, keywords: dict[str, object]) -> None:
    ensemble = Ensemble([lambda x, t: x - 1], None, [1.0], shape=(2,))
    with pytest.raises(MathError) as caught:
        ensemble.sample(**keywords)  # type: ignore[arg-type]
    assert caught.value.subject == subject
    with pytest.raises(ShapeError):
        Ensemble([lambda x, t: x - 1], None, [1.0], shape=4)  # type: ignore[arg-type]
    assert len(ensemble.sample(np.int64(2))) == 2  # type: ignore[arg-type]


def test_name_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for drawn, name in (
        (samples(1, 4, 4), "a.jpg"),
        (samples(1, 4, 4), "a.nii"),
        (samples(1, 4, 4), "file"),
        (samples(2, 4, 4), "a.png"),
        (samples(4, 4, 4), "folder"),
        (samples(2, 4, 4, 4), "a.png"),
    ):
        with case(name=name), pytest.raises(SetupError):
            drawn.save(tmp_path / name)
    assert not (tmp_path / "folder").exists()
    assert len(repr(samples(1, 4, 4))) < 120


def test_picture_and_mask_that_a_user_gives_are_read_or_refused(tmp_path: Path) -> None:
    spec = DataSpec(shape=(3, 4, 6), range=(0.0, 1.0))
    pixels = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    images = read_given_images(tmp_path / "a.png", spec)
    np.testing.assert_allclose(images[0], pixels.transpose(2, 0, 1) / 255, atol=1e-6)
    white = np.zeros((4, 6), np.uint8)
    white[:, 3:] = 255
    Image.fromarray(white).save(tmp_path / "mask.png")
    np.savez(tmp_path / "mask.npz", mask=white > 0)
    for name in ("mask.png", "mask.npz"):
        np.testing.assert_array_equal(read_mask(tmp_path / name, spec), white > 0)
    Image.fromarray(np.full((4, 6), 9, np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(np.zeros((4, 6), np.uint8)).save(tmp_path / "black.png")
    (tmp_path / "text.png").write_text("no picture")
    np.savez(tmp_path / "float.npz", mask=np.ones((4, 6)))
    with pytest.raises(DataError, match="bool or whole numbers") as refused:
        read_mask(tmp_path / "float.npz", spec)
    # A mask has no range that it could be scaled to.
    assert "without an axis of channels" in str(refused.value.remedy)
    for name in ("grey.png", "black.png", "text.png", "float.npz"):
        with case(name=name), pytest.raises(DataError):
            read_mask(tmp_path / name, spec)
    for other in (
        DataSpec(shape=(3, 6, 4), range=(0.0, 1.0)),
        DataSpec(shape=(2, 4, 6), range=(0.0, 1.0)),
    ):
        with pytest.raises(DataError):
            read_given_images(tmp_path / "a.png", other)


def test_samples_of_an_ensemble_bear_its_release(tmp_path: Path) -> None:
    ensemble = Ensemble([lambda x, t: x], None, [1.0], (1, 4, 4), release=DIGEST)
    ensemble.sample(1, steps=1).save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        assert str(file["release"]) == DIGEST
