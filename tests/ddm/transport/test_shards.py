import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm.errors import DigestError, FormatError, UnsafePathError
from ddm.transport.messages import IndexEntry, Span, truncate_spans
from ddm.transport.shards import PartFolder, list_folder, read_spans, whole_spans

LIMITS = {"max_files": 10, "max_bytes": 10_000}


@pytest.fixture
def sent(tmp_path):
    folder = tmp_path / "sent"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "a.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "b.json").write_bytes(b"{}")
    (folder / "empty").write_bytes(b"")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@given(data=st.data())
@settings(max_examples=8)
def test_folder_arrives_identical_when_its_ranges_come_in_any_order_with_restarts(
    tmp_path_factory, data
):
    root = tmp_path_factory.mktemp("arrival")
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    source = root / "source"
    source.mkdir()
    for number, size in enumerate(sizes):
        (source / f"f{number}").write_bytes(os.urandom(size))
    index = list_folder(source, **LIMITS, with_digest=True)
    target = root / "target"
    part = PartFolder(target, index)
    for _ in range(200):
        missing = part.missing(data.draw(st.integers(40, 200)))
        if not missing:
            break
        chosen = data.draw(st.permutations(missing))[: data.draw(st.integers(1, 3))]
        part.write([(span, read_spans(source, [span])) for span in chosen])
        assert not part.finish() or target.exists()
        if data.draw(st.booleans()) and not target.exists():
            part = PartFolder(target, index)
        if target.exists():
            break
    assert contents(target) == contents(source)
    shutil.rmtree(root)


def test_part_folder_forgets_what_it_has_when_the_index_changes(sent, tmp_path):
    index = list_folder(sent, **LIMITS)
    part = PartFolder(tmp_path / "new", index)
    part.write([(Span(path="b.json", offset=0, num_bytes=2), b"{}")])
    assert "b.json" not in {span.path for span in PartFolder(tmp_path / "new", index).missing(100)}
    changed = (*index[:-1], IndexEntry(path="other", num_bytes=1))
    assert "b.json" in {span.path for span in PartFolder(tmp_path / "new", changed).missing(100)}


def test_part_folder_is_thrown_away_when_a_received_byte_was_flipped(sent, tmp_path):
    index = list_folder(sent, **LIMITS, with_digest=True)
    part = PartFolder(tmp_path / "new", index)
    pieces = [(span, read_spans(sent, [span])) for span in part.missing(10_000)]
    part.write([(span, b"[}" if span.path == "b.json" else piece) for span, piece in pieces])
    with pytest.raises(DigestError):
        part.finish()
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.part").exists()


@pytest.mark.parametrize(
    ("span", "data"),
    [
        (Span(path="b.json", offset=1, num_bytes=2), b"xx"),
        (Span(path="unlisted", offset=0, num_bytes=1), b"x"),
        (Span(path="b.json", offset=0, num_bytes=2), b"x"),
    ],
)
def test_range_is_refused_when_it_lies_outside_the_index(sent, tmp_path, span, data):
    part = PartFolder(tmp_path / "new", list_folder(sent, **LIMITS))
    with pytest.raises(FormatError):
        part.write([(span, data)])


def test_listing_is_refused_when_the_folder_holds_a_symbolic_link_or_a_pipe(sent, tmp_path):
    (sent / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafePathError):
        list_folder(sent, **LIMITS)
    (sent / "link").unlink()
    os.mkfifo(sent / "pipe")
    with pytest.raises(UnsafePathError):
        list_folder(sent, **LIMITS)


def test_range_is_not_read_when_a_step_of_its_path_is_a_symbolic_link(sent, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"s" * 10)
    (sent / "door").symlink_to(secret)
    (sent / "window").symlink_to(secret / "key")
    for path in ("door/key", "window"):
        with pytest.raises(UnsafePathError):
            read_spans(sent, [Span(path=path, offset=0, num_bytes=1)])


def test_range_is_not_written_when_a_folder_on_the_way_became_a_symbolic_link(sent, tmp_path):
    part = PartFolder(tmp_path / "new", list_folder(sent, **LIMITS))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new.part" / "deep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        part.write([(Span(path="deep/er/a.bin", offset=0, num_bytes=1), b"x")])


def test_range_is_refused_when_it_ends_beyond_its_file(sent):
    with pytest.raises(FormatError):
        read_spans(sent, [Span(path="b.json", offset=0, num_bytes=3)])
    with pytest.raises(FormatError):
        read_spans(sent, [Span(path="nothing", offset=0, num_bytes=1)])


@pytest.mark.parametrize(
    "limit", [{"max_files": 2, "max_bytes": 10_000}, {"max_files": 10, "max_bytes": 1000}]
)
def test_listing_is_refused_when_the_folder_is_over_a_limit(sent, limit):
    with pytest.raises(FormatError):
        list_folder(sent, **limit)


def test_first_ranges_hold_exactly_the_limit_when_there_is_more(sent):
    spans = list(whole_spans(list_folder(sent, **LIMITS)))
    assert [(span.path, span.num_bytes) for span in truncate_spans(spans, 1000)] == [
        ("b.json", 2),
        ("deep/er/a.bin", 998),
        ("empty", 0),
    ]
    assert sum(span.num_bytes for span in truncate_spans(spans, 10_000)) == 1026


def test_first_ranges_start_where_the_ranges_do():
    spans = [Span(path="a", offset=100, num_bytes=50), Span(path="b", offset=7, num_bytes=50)]
    assert truncate_spans(spans, 60) == (spans[0], Span(path="b", offset=7, num_bytes=10))
    assert truncate_spans(spans, 50) == (spans[0],)
    assert truncate_spans(spans, 0) == ()


def test_range_on_its_way_is_not_named_again_however_it_was_cut(sent, tmp_path):
    part = PartFolder(tmp_path / "new", list_folder(sent, **LIMITS))
    part.write([(Span(path="deep/er/a.bin", offset=0, num_bytes=100), bytes(100))])
    coming = [
        Span(path="deep/er/a.bin", offset=300, num_bytes=200),
        Span(path="empty", offset=0, num_bytes=0),
    ]
    missing = part.missing(150, in_flight=coming)
    assert [(span.path, span.offset, span.num_bytes) for span in missing] == [
        ("b.json", 0, 2),
        ("deep/er/a.bin", 100, 150),
        ("deep/er/a.bin", 250, 50),
        ("deep/er/a.bin", 500, 150),
        ("deep/er/a.bin", 650, 150),
        ("deep/er/a.bin", 800, 150),
        ("deep/er/a.bin", 950, 74),
    ]
    assert "empty" in {span.path for span in part.missing(150)}, "what is on its way may be lost"


def test_folder_of_many_gibibytes_takes_no_memory_and_no_disk_where_it_is_empty(tmp_path):
    """A range far out in a file of 12 GiB is written without anything before it."""
    entry = IndexEntry(path="expert", num_bytes=12 * 2**30)
    part = PartFolder(tmp_path / "new", [entry])
    part.write(
        [
            (
                Span(path="expert", offset=entry.num_bytes - 10, num_bytes=10),
                memoryview(b"0123456789"),
            )
        ]
    )
    stored = (tmp_path / "new.part" / "expert").stat()
    assert stored.st_size == entry.num_bytes and stored.st_blocks * 512 < 2**20
    assert part.missing(2**40) == [Span(path="expert", offset=0, num_bytes=entry.num_bytes - 10)]
