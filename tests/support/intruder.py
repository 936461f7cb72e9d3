"""Another user of the machine, who wants to speak for a silo or for its aggregator, with Flower's own clients.

`python -m tests.support.intruder USER PORT,PORT... PID,PID...` gives up all rights but those of `USER`, then attacks
the ports, reads what `ps` shows of the processes, and prints what it got, a JSON object, when its input closes.
"""

import json
import os
import re
import select
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient

TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])")


class Intruder:
    """Tries everything, again and again, and notes what succeeded."""

    def __init__(self, ports: list[int], pids: list[int]) -> None:
        self.ports = ports
        self.pids = pids
        self.got: dict[str, int] = {}
        self.tokens: set[str] = set()
        self.urls = [
            f"{scheme}://127.0.0.1:{port}" for port in ports for scheme in ("http", "https")
        ]
        # A stranger does not mind whose certificate it is.
        self.trusting = ssl._create_unverified_context()

    def note(self, what: str) -> None:
        self.got[what] = self.got.get(what, 0) + 1

    def round(self) -> None:
        """Attack once."""
        for pid in self.pids_below():
            self.read_process(pid)
        for url in self.urls:
            self.pages(url)
            self.acquire(url)
            self.control(url)
            self.fleet(url)
            for token in list(self.tokens):
                self.use(url, token)

    def pids_below(self) -> Iterator[int]:
        """All processes below those that were named, as `ps` shows them to everybody."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # The name of a program, in brackets, may hold anything; the parent is the second field behind it.
                fields = entry.read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
        process_ids = list(self.pids)
        for pid in process_ids:
            process_ids += parents.get(pid, [])
            yield pid

    def read_process(self, pid: int) -> None:
        for name in ("cmdline", "environ", "fd"):
            with suppress(OSError):
                path = Path(f"/proc/{pid}/{name}")
                if name == "fd":
                    data = b"".join(os.fsencode(entry) for entry in path.iterdir())
                else:
                    data = path.read_bytes()
                # `ps` shows everybody the command lines, which is no success by itself.
                if name != "cmdline":
                    self.note(f"read {name}")
                for token in TOKEN.findall(data):
                    self.note(f"a token in {name}")
                    self.tokens.add(token.decode())

    def client(self, kind: type, url: str, *interceptors: Any) -> Any:
        return kind(url, interceptors=interceptors, verify=self.trusting, timeout=5.0)

    def attempt(self, what: str, act: Callable[[], Any]) -> Any:
        """Act; note it where the answer is more than a refusal."""
        try:
            answer = act()
        except (httpx.HTTPError, RuntimeError, ValueError):
            return None
        self.note(what)
        return answer

    def pages(self, url: str) -> None:
        for path in ("/docs", "/openapi.json"):
            with suppress(httpx.HTTPError):
                if httpx.get(url + path, verify=self.trusting, timeout=5.0).status_code == 200:
                    self.note(f"page {path}")
            for connection in self.connections_with(url):
                # uvicorn believes a request from loopback that states the address of its client.
                named = {"X-Forwarded-For": connection}
                with suppress(httpx.HTTPError):
                    answer = httpx.get(url + path, headers=named, verify=self.trusting, timeout=5.0)
                    if answer.status_code == 200:
                        self.note(f"page {path} under another address")

    def connections_with(self, url: str) -> list[str]:
        """The other ends of a server's open connections, which the kernel lists for everybody."""
        server = f":{int(url.rpartition(':')[2]):04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = [row[1].rpartition(":")[2] for row in rows if row[2].endswith(server)]
        return [f"127.0.0.1:{int(port, 16)}" for port in ports]

    def acquire(self, url: str) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        client = self.client(RuntimeHttpClient, url, version)
        request = AcquireTaskRequest(supported_task_types=[kind.value for kind in TaskType])
        answer = self.attempt("asked for tasks", lambda: client.AcquireTask(request))
        if answer is not None and answer.token:
            self.note("took a task")
            self.use(url, answer.token)
        client.close()

    def use(self, url: str, token: str) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = self.client(RuntimeHttpClient, url, version, RuntimeTokenHttpInterceptor(token))
        self.attempt("read a task's input", lambda: client.PullTaskInput(PullTaskInputRequest()))
        self.attempt("read messages", lambda: client.PullMessages(PullAppMessagesRequest()))
        self.attempt("listed nodes", lambda: client.GetNodes(GetNodesRequest()))
        self.attempt(
            "ended a task",
            lambda: client.PushTaskOutput(PushTaskOutputRequest(sub_status="failed")),
        )
        client.close()

    def control(self, url: str) -> None:
        client = self.client(ControlHttpClient, url)
        self.attempt("listed runs", lambda: client.ListRuns(ListRunsRequest()))
        self.attempt(
            "started a run",
            lambda: client.StartRun(StartRunRequest(fab=Fab(hash_str="", content=b"x"))),
        )
        client.close()

    def fleet(self, url: str) -> None:
        client = self.client(FleetHttpClient, url)
        self.attempt(
            "registered a node",
            lambda: client.RegisterNode(RegisterNodeFleetRequest(public_key=b"x")),
        )
        client.close()


def main(user: int, ports: list[int], pids: list[int]) -> None:
    """Become somebody else, attack until the input closes, print what it brought."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    intruder = Intruder(ports, pids)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        intruder.round()
    print(json.dumps(intruder.got), flush=True)


if __name__ == "__main__":
    main(
        user=int(sys.argv[1]),
        ports=[int(port) for port in sys.argv[2].split(",") if port],
        pids=[int(pid) for pid in sys.argv[3].split(",") if pid],
    )
