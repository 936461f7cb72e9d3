"""A real HTTP proxy on loopback that opens tunnels to one port for one user: Debian's tinyproxy."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddm.system.processes import free_port
from tests.support.waiting import wait_until

AVAILABLE = shutil.which("tinyproxy") is not None
USER = "ward"
PASSWORD = "s3cret"


@dataclass
class Tinyproxy:
    """The proxy, which can be stopped and started again at the same port."""

    folder: Path
    to_port: int
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    def url(self, user: str = USER, password: str = PASSWORD) -> str:
        """What a site writes into https_proxy."""
        return f"http://{user}:{password}@127.0.0.1:{self.port}"

    def log(self) -> str:
        """Return what it noted."""
        path = self.folder / "log"
        if not path.exists():
            return ""
        return path.read_text()

    def start(self) -> None:
        """Serve."""
        settings = (
            f"Port {self.port}\nListen 127.0.0.1\nTimeout 600\nMaxClients 50\nLogLevel Connect\n"
            f'LogFile "{self.folder}/log"\nAllow 127.0.0.0/8\nBasicAuth {USER} {PASSWORD}\nConnectPort {self.to_port}\n'
        )
        (self.folder / "conf").write_text(settings)
        self.process = subprocess.Popen(
            ["tinyproxy", "-d", "-c", self.folder / "conf"], stdout=subprocess.DEVNULL
        )
        wait_until(self.listens, "the proxy")

    def listens(self) -> bool:
        """Whether it takes connections."""
        with socket.socket() as link:
            return link.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """Serve no longer; what was open ends."""
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def run_tinyproxy(folder: Path, to_port: int) -> Iterator[Tinyproxy]:
    """A proxy that is gone afterwards."""
    folder.mkdir()
    proxy = Tinyproxy(folder, to_port, free_port())
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
