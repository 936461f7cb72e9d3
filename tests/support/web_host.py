"""A web host on loopback for a release, honest or not, and python-tuf's own client that reads from it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tuf.ngclient import Updater, UpdaterConfig
from tuf.ngclient.urllib3_fetcher import Urllib3Fetcher

SENT_AT_ONCE = 1 << 16


class WebHost(ThreadingHTTPServer):
    """Serves a folder; a path in `endless` never ends, one in `silent` stops after its first byte."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.endless: set[str] = set()
        self.silent: set[str] = set()
        self.over = threading.Event()
        self.sent = 0
        super().__init__(("127.0.0.1", 0), partial(_FolderHandler, directory=str(folder)))

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _FolderHandler(SimpleHTTPRequestHandler):
    server: WebHost

    def do_GET(self) -> None:
        if self.path not in self.server.endless | self.server.silent:
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        try:
            if self.path in self.server.silent:
                self.wfile.write(b" ")
                self.server.over.wait()
                self.close_connection = True
                return
            while True:
                self.wfile.write(b" " * SENT_AT_ONCE)
                self.server.sent += SENT_AT_ONCE
        except OSError:
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def serve_folder(folder: Path) -> Iterator[WebHost]:
    """Serve a folder."""
    folder.mkdir(exist_ok=True)
    with WebHost(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


def tuf_client(url: str, cache: Path, root: bytes, *, patience_s: int = 30) -> Updater:
    """Python-tuf's client, without a line of ours; `cache` is its memory.

    Args:
        url: of the host.
        cache: what it keeps from one look to the next.
        root: the pinned root.
        patience_s: how long it waits for the next bytes; python-tuf's own default.
    """
    files = cache / "files"
    files.mkdir(parents=True, exist_ok=True)
    fetcher = Urllib3Fetcher(socket_timeout=patience_s)
    config = UpdaterConfig(prefix_targets_with_hash=False)
    return Updater(
        str(cache),
        f"{url}/metadata/",
        str(files),
        f"{url}/targets/",
        fetcher,
        config,
        bootstrap=root,
    )
