"""HTTP within bounds: honest hosts, and hosts that send too much, too little, too slowly, or elsewhere."""

import io
from pathlib import Path

import pytest

from ddm.errors import AbsentFileError, DigestError, DocumentError, TransportError
from ddm.fetching.address import WebAddress, read_address, url_problem
from ddm.fetching.download import fetch_file, read_file
from ddm.fetching.hosts import FetchLimits
from ddm.fetching.web import WebHost
from ddm.protocol.base import sha256_hex
from ddm.trust.rules import SignedFile
from tests.support.hosts import (
    HostHandler,
    HostState,
    TestAuthority,
    breaking_off,
    endless,
    redirecting,
    replacing,
    seconds_of,
    serve,
    silent,
    trickling,
    trickling_headers,
)

DATA = bytes(range(256)) * 4096  # 1 MiB
SIGNED = SignedFile(len(DATA), sha256_hex(DATA), "release")
# What may pass before a host that stalls is given up, in two attempts of two windows, on a busy machine.
SLOWEST_S = 20.0


@pytest.fixture(autouse=True)
def _file(state: HostState) -> None:
    state.folder.mkdir()
    (state.folder / "file").write_bytes(DATA)


def fetch(url: str, limits: FetchLimits, handle: io.BytesIO | None = None) -> bytes:
    handle = handle or io.BytesIO()
    with pytest.MonkeyPatch.context() as patched:
        # A file in memory has no descriptor.
        patched.setattr("ddm.fetching.download.os.fsync", lambda descriptor: None)
        patched.setattr(handle, "fileno", lambda: 0, raising=False)
        fetch_file(WebHost(url, limits), "file", SIGNED, handle, limits)
    return handle.getvalue()


class MemoryFile(io.BytesIO):
    """A file in memory that takes attributes."""


def test_file_comes_whole(url: str, limits: FetchLimits) -> None:
    assert fetch(url, limits, MemoryFile()) == DATA


def test_transfer_goes_on_where_it_broke_off(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    state.answers["/file"] = breaking_off(state.folder / "file", 600_000)
    assert fetch(url, limits, MemoryFile()) == DATA
    assert [request.start for request in state.requests] == [0, 600_000]
    assert state.num_bytes == len(DATA)


def test_file_begins_again_when_the_first_part_was_another_host_s(
    url: str, limits: FetchLimits
) -> None:
    assert fetch(url, limits, MemoryFile(b"x" * 1000)) == DATA


def test_transfer_that_breaks_off_again_and_again_is_given_up_and_kept(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    state.answers["/file"] = breaking_off(state.folder / "file", 1000)
    handle = MemoryFile()
    with pytest.raises(TransportError) as refused:
        fetch(url, limits, handle)
    assert refused.value.got == f"2000 of {len(DATA)} bytes"
    assert handle.getvalue() == DATA[:2000]


def test_file_of_a_host_that_cannot_begin_in_the_middle_comes_whole(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    def whole(handler: HostHandler) -> None:
        handler.send_head(200, len(DATA))
        handler.send_body(DATA)

    state.answers["/file"] = whole
    assert fetch(url, limits, MemoryFile(DATA[:1000])) == DATA


def test_other_bytes_are_refused_and_nothing_of_them_is_kept(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    state.answers["/file"] = replacing(b"x" + DATA[1:])
    handle = MemoryFile()
    with pytest.raises(DigestError):
        fetch(url, limits, handle)
    assert handle.getvalue() == b""


@pytest.mark.parametrize("length", [10, len(DATA) - 1, len(DATA) + 1, 1 << 40])
def test_file_of_another_length_is_refused_before_its_first_byte(
    url: str, state: HostState, limits: FetchLimits, length: int
) -> None:
    def announce(handler: HostHandler) -> None:
        handler.send_head(200, length)
        handler.state.over.wait()

    state.answers["/file"] = announce
    with pytest.raises(DigestError, match=f"{length} bytes"):
        fetch(url, limits, MemoryFile())


def test_endless_file_is_refused_at_its_signed_length(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    state.answers["/file"] = endless
    handle = MemoryFile()
    with pytest.raises(DigestError, match="more from"):
        fetch(url, limits, handle)
    assert handle.getvalue() == b""


def test_endless_metadata_are_refused_at_their_limit(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    state.answers["/file"] = endless
    with pytest.raises(DocumentError, match="at most 1000 bytes"):
        read_file(WebHost(url, limits), "file", 1000, limits)


@pytest.mark.parametrize(
    "answer", [silent, trickling(0.01), trickling_headers(0.01)], ids=["silent", "body", "headers"]
)
def test_host_that_stalls_is_given_up_in_time(
    url: str, state: HostState, limits: FetchLimits, answer
) -> None:
    state.answers["/file"] = answer

    def refuse() -> None:
        # A connection that is made late, on a busy machine, ends at the other limit.
        given_up = "fewer than 1024 bytes in 0.2 seconds|no answer in time"
        with pytest.raises(TransportError, match=given_up):
            fetch(url, limits, MemoryFile())

    assert seconds_of(refuse) < SLOWEST_S


def test_control_slow_host_that_sends_enough_is_not_given_up(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    def slow(handler: HostHandler) -> None:
        handler.send_head(200, len(DATA))
        for begin in range(0, len(DATA), len(DATA) // 16):
            handler.send_body(DATA[begin : begin + len(DATA) // 16])
            handler.state.over.wait(0.05)

    state.answers["/file"] = slow
    assert fetch(url, limits, MemoryFile()) == DATA


@pytest.mark.parametrize(
    ("location", "got"),
    [
        ("file:///etc/passwd", "file://"),
        ("ftp://127.0.0.1/file", "ftp://"),
        ("http://example.org/file", "http:// to another machine"),
        ("http://127.0.0.1:1/file", "127.0.0.1:1"),
        ("https://127.0.0.1/file", "https://127.0.0.1:443"),
        ("//example.org/file", "http:// to another machine"),
        ("http://user:secret@127.0.0.1/file", "name or password"),
        ("http://[::1/file", "cannot be read"),
        ("data:text/plain,abc", "data://"),
    ],
)
def test_redirect_to_another_place_is_refused(
    url: str, state: HostState, limits: FetchLimits, location: str, got: str
) -> None:
    state.answers["/file"] = redirecting(location)
    with pytest.raises(TransportError) as refused:
        fetch(url, limits, MemoryFile())
    assert got in str(refused.value)


def test_redirect_within_the_host_is_followed_and_a_circle_is_not(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    (state.folder / "moved").write_bytes(DATA)
    state.answers["/file"] = redirecting("/moved")
    assert fetch(url, limits, MemoryFile()) == DATA
    state.answers["/moved"] = redirecting(f"{url}/file")
    with pytest.raises(TransportError, match="6 redirects"):
        fetch(url, limits, MemoryFile())


def test_statuses_are_told_apart(url: str, state: HostState, limits: FetchLimits) -> None:
    for status, kind in ((404, AbsentFileError), (401, TransportError), (500, TransportError)):
        state.answers["/file"] = lambda handler, status=status: handler.send_head(status, 0)
        with pytest.raises(kind, match=f"HTTP status {status}"):
            fetch(url, limits, MemoryFile())


def test_answer_that_is_not_http_is_refused_without_its_text(
    url: str, state: HostState, limits: FetchLimits
) -> None:
    def answer(handler: HostHandler) -> None:
        handler.wfile.write(b"SECRET \x1b[2J\r\n\r\n")

    state.answers["/file"] = answer
    with pytest.raises(TransportError) as refused:
        fetch(url, limits, MemoryFile())
    assert "SECRET" not in str(refused.value)


def test_nobody_listening_is_told(limits: FetchLimits) -> None:
    with pytest.raises(TransportError, match="Connection refused"):
        fetch("http://127.0.0.1:9", limits, MemoryFile())


def test_host_over_tls_is_trusted_by_the_authority_that_is_named_and_by_no_other(
    state: HostState, limits: FetchLimits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = TestAuthority.make(tmp_path)
    with serve(HostHandler, state, authority.server) as url:
        with pytest.raises(TransportError, match="certificate"):
            fetch(url, limits, MemoryFile())
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert fetch(url, limits, MemoryFile()) == DATA
        # Neither another name of the same machine, nor from TLS to plain text.
        with pytest.raises(TransportError, match="certificate"):
            fetch(url.replace("127.0.0.1", "localhost"), limits, MemoryFile())
        state.answers["/file"] = redirecting(url.replace("https", "http"))
        with pytest.raises(TransportError, match="a redirect to http://"):
            fetch(url, limits, MemoryFile())


def test_host_that_stalls_within_the_handshake_is_given_up_in_time(
    state: HostState, limits: FetchLimits
) -> None:
    # A host without TLS, to which TLS speaks: it waits for the end of a line, and the reader for an answer.
    with serve(HostHandler, state) as url:
        address = url.replace("http://", "https://")

        def refuse() -> None:
            with pytest.raises(TransportError):
                fetch(address, limits, MemoryFile())

        assert seconds_of(refuse) < SLOWEST_S


@pytest.mark.parametrize(
    "text",
    [
        "http://example.org/release",
        "ftp://example.org/release",
        "file:///srv/release",
        "https://user@example.org/release",
        "https:///release",
        "https://example.org:0/release",
        "https://example.org:99999/release",
        "https://example.org/a b",
        "https://example.org/a\r\nHost: other",
        "https://" + "a" * 2000,
    ],
)
def test_address_that_may_not_be_fetched_from_has_a_problem(text: str) -> None:
    assert url_problem(text) is not None


def test_web_address_is_read_and_a_path_is_none() -> None:
    assert read_address("https://example.org/a/") == WebAddress("https://example.org/a")
    assert read_address("http://127.0.0.1:80") == WebAddress("http://127.0.0.1:80")
    assert read_address("release") is None
    assert read_address("/srv/https:/x") is None
