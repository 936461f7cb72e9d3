"""Tar archives of images, made with `tarfile` or by hand."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddm.images.content import FileContent
from ddm.images.formats import decode
from ddm.images.picture import DecodedPicture, DecodeLimits
from ddm.images.reasons import ImageError, Reason
from tests.support.case import case


def encoded(value: int, kind: str = "PNG", size: tuple[int, int] = (20, 16)) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full(size, value, np.uint8)).save(data, kind)
    return data.getvalue()


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive(path: Path, members: list[Any], mode: str = "w", **options: Any) -> Path:
    """Write an archive of members, each a name with bytes, or a header with bytes."""
    with tarfile.open(path, mode, **options) as tar:
        for head, data in members:
            info = head if isinstance(head, tarfile.TarInfo) else member(head, data)[0]
            tar.addfile(info, io.BytesIO(data))
    return path


def rows_of(path: Path, limits: DecodeLimits | None = None) -> list[Any]:
    """The value, label, caption, patient and split of each picture, or the reason of its error; the last may end it."""
    rows: list[Any] = []
    try:
        for actual in decode(FileContent.of(path), limits):
            if isinstance(actual, DecodedPicture):
                value = int(actual.values.max())
                rows.append((value, actual.label, actual.caption, actual.patient, actual.split))
            else:
                rows.append(actual.reason)
    except ImageError as error:
        rows.append(("end", error.reason))
    return rows


def test_samples_come_with_the_members_of_their_key(tmp_path: Path) -> None:
    facts = json.dumps({"label": 3, "patient": "p7", "split": "test", "width": 16}).encode()
    members: list[Any] = [
        ("a/001.png", encoded(1)),
        ("a/001.cls", b"7\n"),
        ("a/001.txt", "Ein Bär".encode()),
        ("a/002.json", facts),  # before its image
        ("a/002.caption", b"text"),
        ("a/002.webp", encoded(2, "WEBP")),
        ("./b/x.y.tif", encoded(3, "TIFF")),  # the key ends at the first dot
        ("./b/x.cls", b"cat"),
        ("c.npy", npy(4)),
        ("README.md", b"# about"),
        ("folder/", b""),
        ("._hidden.png", b"no picture"),
        ("d.JPG", encoded(5, "JPEG")),
        ("d.pyd", b"pickled"),
    ]
    expected = [
        (1, "7", "Ein Bär", None, None),
        (2, "3", "text", "p7", "test"),
        (3, "cat", None, None, None),
        (4, None, None, None, None),
        (5, None, None, None, None),
    ]
    members[10] = member("folder", type=tarfile.DIRTYPE)
    for layout in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        for mode, name in (("w", "a.tar"), ("w:gz", "a.tar.gz")):
            with case(layout, mode):
                assert rows_of(archive(tmp_path / name, members, mode, format=layout)) == expected
                assert rows_of_data(tmp_path / name) == len(expected)


def npy(value: int) -> bytes:
    data = io.BytesIO()
    np.save(data, np.full((20, 16), value, np.uint8))
    return data.getvalue()


def rows_of_data(path: Path) -> int:
    """How many pictures the archive gives when its content was read already, as a decoder process does."""
    return len(list(decode(FileContent.of(path, path.read_bytes()))))


def test_names_longer_than_a_header_and_pax_records_are_understood(tmp_path: Path) -> None:
    key = "ordner/" + "ä" * 200
    members = [(f"{key}.png", encoded(1)), (f"{key}.cls", b"1"), ("z.png", encoded(2))]
    for layout in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = archive(tmp_path / "a.tar", members, format=layout)
        assert [row[:2] for row in rows_of(path)] == [(1, "1"), (2, None)]
    path = archive(
        tmp_path / "b.tar", members, format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}
    )
    assert [row[:2] for row in rows_of(path)] == [(1, "1"), (2, None)]


def test_a_sample_whose_meaning_is_not_certain_is_refused_and_the_next_is_read(
    tmp_path: Path,
) -> None:
    image = ("a.png", encoded(1))
    wrong: dict[str, tuple[list[Any], Reason]] = {
        "two images": ([image, ("a.jpg", encoded(2, "JPEG"))], Reason.AMBIGUOUS),
        "image and mask": ([image, ("a.mask.png", encoded(2))], Reason.AMBIGUOUS),
        "one name twice": ([image, ("a.png", encoded(2))], Reason.AMBIGUOUS),
        "two labels": ([image, ("a.cls", b"1"), ("a.cls", b"2")], Reason.AMBIGUOUS),
        "labels differ": ([image, ("a.cls", b"1"), ("a.json", b'{"label": 2}')], Reason.AMBIGUOUS),
        "captions differ": ([image, ("a.txt", b"x"), ("a.caption", b"y")], Reason.AMBIGUOUS),
        "json twice": ([image, ("a.json", b'{"label": 1, "label": 2}')], Reason.AMBIGUOUS),
        "json two names": ([image, ("a.json", b'{"label": 1, "class": 2}')], Reason.AMBIGUOUS),
        "json list": ([image, ("a.json", b'{"label": [1, 2]}')], Reason.UNSUPPORTED),
        "json broken": ([image, ("a.json", b'{"label": ')], Reason.DAMAGED),
        "json deep": ([image, ("a.json", b"[" * 100_000)], Reason.DAMAGED),
        "json number": ([image, ("a.json", b'{"label": ' + b"9" * 9999 + b"}")], Reason.DAMAGED),
        "no UTF-8": ([image, ("a.txt", b"\xff\xfe\xfa")], Reason.DAMAGED),
        "long label": ([image, ("a.cls", b"x" * 2000)], Reason.TOO_LARGE),
        "long json label": (
            [image, ("a.json", json.dumps({"label": "x" * 2000}).encode())],
            Reason.TOO_LARGE,
        ),
        "large json": (
            [image, ("a.json", b'{"a": "' + b"x" * (1 << 20) + b'"}')],
            Reason.TOO_LARGE,
        ),
        "no image": ([("a.cls", b"1"), ("a.pth", b"")], Reason.NO_PIXELS),
        "no format": ([("a.ppm", encoded(1, "PPM"))], Reason.UNSUPPORTED),
        "no picture": ([("a.png", b"hello")], Reason.UNKNOWN),
        "container": ([("a.png", archive_data())], Reason.UNSUPPORTED),
        "link": (
            [image, member("a.cls", type=tarfile.SYMTYPE, linkname="z.cls")],
            Reason.UNSUPPORTED,
        ),
        "linked image": (
            [member("a.png", type=tarfile.LNKTYPE, linkname="z.png")],
            Reason.UNSUPPORTED,
        ),
        "device": ([member("a.png", type=tarfile.CHRTYPE)], Reason.UNSUPPORTED),
        "pipe": ([member("a.png", type=tarfile.FIFOTYPE)], Reason.UNSUPPORTED),
        "old sparse": (
            [member("a.png", encoded(1), type=tarfile.GNUTYPE_SPARSE)],
            Reason.UNSUPPORTED,
        ),
        "sparse": ([sparse("a.png", encoded(1))], Reason.UNSUPPORTED),
        "absolute": ([("/etc/a.png", encoded(1))], Reason.UNSUPPORTED),
        "up": ([("../a.png", encoded(1))], Reason.UNSUPPORTED),
        "up within": ([("x/../../a.png", encoded(1))], Reason.UNSUPPORTED),
        "backslash": ([("..\\a.png", encoded(1))], Reason.UNSUPPORTED),
    }
    for name, (members, reason) in wrong.items():
        with case(name):
            path = archive(
                tmp_path / "a.tar", [*members, ("z.png", encoded(9))], format=tarfile.PAX_FORMAT
            )
            first, second = rows_of(path)
            assert first is reason and second == (9, None, None, None, None)


def sparse(name: str, data: bytes, sparse_map: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    """A sparse member as GNU tar writes it in pax; by default its map lists one piece."""
    sparse_map = (sparse_map or f"1\n0\n{len(data)}\n".encode()).ljust(512, b"\0")
    return member(
        name, sparse_map + data, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    )


def archive_data() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(member("a.png", encoded(1))[0], io.BytesIO(encoded(1)))
    return data.getvalue()


def test_a_key_that_comes_again_after_others_is_refused(tmp_path: Path) -> None:
    members = [("a.png", encoded(1)), ("b.png", encoded(2)), ("a.cls", b"1"), ("c.png", encoded(3))]
    actual = rows_of(archive(tmp_path / "a.tar", members))
    assert [row[0] if isinstance(row, tuple) else row for row in actual] == [
        1,
        2,
        Reason.AMBIGUOUS,
        3,
    ]


def test_what_equals_itself_is_no_contradiction(tmp_path: Path) -> None:
    members = [
        ("a.png", encoded(1)),
        ("a.cls", b"1"),
        ("a.json", b'{"label": 1.0, "caption": null}'),
        ("a.txt", b"x"),
    ]
    assert rows_of(archive(tmp_path / "a.tar", members)) == [(1, "1", "x", None, None)]


def test_an_archive_that_is_cut_short_ends_after_what_came_before(tmp_path: Path) -> None:
    members = [("a.png", encoded(1)), ("a.cls", b"1"), ("b.png", encoded(2)), ("b.cls", b"2")]
    for mode in ("w", "w:gz"):
        whole = archive(tmp_path / "a.tar", members, mode).read_bytes()
        data = gzip.decompress(whole) if mode == "w:gz" else whole
        first = data.index(b"b.png")
        # Where the header of b is cut, nothing tells whether a has further members.
        before = {first: [], first + 100: [], first + 512: [(1, "1", None, None, None)]}
        for end in (
            first,
            first + 100,
            first + 512,
            first + 532,
            first + 1024,
            data.index(b"b.cls"),
        ):
            with case(mode, end):
                cut = data[:end]
                path = tmp_path / "cut.tar"
                path.write_bytes(gzip.compress(cut) if mode == "w:gz" else cut)
                expected = before.get(end, before[first + 512])
                assert rows_of(path) == [*expected, ("end", Reason.TRUNCATED)]
        if mode == "w:gz":
            (tmp_path / "cut.tar").write_bytes(whole[:-40])
            assert rows_of(tmp_path / "cut.tar")[-1] == ("end", Reason.TRUNCATED)


def test_an_archive_with_damaged_headers_or_another_behind_it_ends_with_its_reason(
    tmp_path: Path,
) -> None:
    whole = archive(tmp_path / "a.tar", [("a.png", encoded(1)), ("b.png", encoded(2))]).read_bytes()
    path = tmp_path / "b.tar"
    path.write_bytes(whole * 2)
    assert rows_of(path) == [(1, *[None] * 4), ("end", Reason.DAMAGED)]
    damaged = bytearray(whole)
    damaged[whole.index(b"b.png") + 3] ^= 1  # the checksum says otherwise
    path.write_bytes(damaged)
    assert rows_of(path)[-1] == ("end", Reason.DAMAGED)
    for name, data in {
        "size": b"\x80" + b"\xff" * 11,
        "negative": b"\xff" * 12,
        "huge": b"77777777777\0",
    }.items():
        with case(name):
            block = bytearray(whole[:512])
            block[124:136] = data
            block[148:156] = b"        "
            block[148:156] = b"%06o\0 " % sum(block)
            path.write_bytes(bytes(block) + whole[512:])
            assert rows_of(path)[-1][1] in (Reason.DAMAGED, Reason.TRUNCATED)
    assert rows_of(archive(path, [("README.md", b"x"), ("a/b", b"y")])) == [("end", Reason.UNKNOWN)]


def test_pax_headers_are_bounded_and_must_parse(tmp_path: Path) -> None:
    for name, data in {
        "large": b"x" * (1 << 17),
        "no length": b"path=a.png\n",
        "too long": b"99 path=a.png\n",
        "zero": b"0 path=a.png\n",
        "size": b"18 size=abcdefgh\n\n",
        "digits": b"60009 a=" + b"1" * 60_000 + b"\n",
    }.items():
        with case(name):
            members = [member("pax", data, type=tarfile.XHDTYPE), ("a.png", encoded(1))]
            actual = rows_of(archive(tmp_path / "a.tar", members, format=tarfile.USTAR_FORMAT))
            assert actual[-1][1] in (Reason.DAMAGED, Reason.TOO_LARGE)


def test_headers_of_one_member_are_bounded_together(tmp_path: Path) -> None:
    pax = b"11 path=ab\n"
    kinds = {
        "many": [member("pax", pax, type=tarfile.XHDTYPE)] * 100,
        "long name": [member("name", b"x" * (1 << 17), type=tarfile.GNUTYPE_LONGNAME)],
        "long link": [member("name", b"x" * (1 << 17), type=tarfile.GNUTYPE_LONGLINK)],
        "sparse map": [sparse("a.png", b"", b"99999\n" + b"1\n" * (1 << 16))],
    }
    for name, members in kinds.items():
        with case(name):
            path = archive(
                tmp_path / "a.tar", [*members, ("z.png", encoded(1))], format=tarfile.PAX_FORMAT
            )
            assert rows_of(path) == [("end", Reason.TOO_LARGE)]


def test_an_image_file_larger_than_the_limit_is_refused_alone(tmp_path: Path) -> None:
    large = ("b.png", bytes(5000))
    members = [("a.png", encoded(1)), large, ("c.png", encoded(3))]
    for mode in ("w", "w:gz"):
        actual = rows_of(archive(tmp_path / "a.tar", members, mode), DecodeLimits(values=4000))
        assert [actual[0][0], actual[1], actual[2][0]] == [1, Reason.TOO_LARGE, 3]


def test_pages_of_one_image_share_what_belongs_to_it(tmp_path: Path) -> None:
    pages = [Image.fromarray(np.full((20, 16), value, np.uint8)) for value in (1, 2)]
    data = io.BytesIO()
    pages[0].save(data, "TIFF", save_all=True, append_images=pages[1:])
    path = archive(tmp_path / "a.tar", [("a.tif", data.getvalue()), ("a.cls", b"x")])
    assert [row[:2] for row in rows_of(path)] == [(1, "x"), (2, "x")]


def test_an_archive_inside_another_file_is_refused() -> None:
    with pytest.raises(ImageError, match="inside another file"):
        list(decode(FileContent(data=archive_data(), name="a.tar")))
