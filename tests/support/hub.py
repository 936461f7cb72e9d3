"""A small Hugging Face Hub on loopback, which speaks the protocol as the package huggingface_hub calls it.

Read: `resolve`, with the commit in a header, and large files through a redirect to another port, as the Hub does to its
CDN. Written: `repos/create`, `validate-yaml`, `preupload`, the batch of git's large files with `PUT` and `verify`,
`tree`, and `commit` with lines of JSON.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tests.support.hosts import HostHandler, HostState, serve

TOKEN = "hf_token_of_a_test"
LARGE_BYTES = 200


@dataclass
class HubState(HostState):
    """The Hub's repositories.

    Attributes:
        commits: of each repository, the files of every commit by their names, the newest last.
        objects: large files by their digests.
        cdn: where large files are; empty where the Hub sends them itself.
        calls: what was asked for by POST and PUT, in order.
    """

    commits: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    cdn: str = ""
    calls: list[str] = field(default_factory=list)

    def files(self, repository: str) -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.commits[repository][-1]


def commit_id(number: int) -> str:
    """The name of a commit."""
    return hashlib.sha1(str(number).encode()).hexdigest()


class HubHandler(HostHandler):
    """The Hub's own part."""

    state: HubState

    def do_GET(self) -> None:
        self.request_seen()
        path = unquote(urlsplit(self.path).path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4] == "tree":
            self._send_tree("/".join(parts[2:4]))
        elif parts[2] == "resolve":
            self._send_resolved("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.send_head(404, 0)

    def _commit(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.state.commits.get(repository, [])
        names = {commit_id(number): number for number in range(len(commits))}
        if commits and revision == "main":
            return commit_id(len(commits) - 1), commits[-1]
        if revision in names:
            return revision, commits[names[revision]]
        return None

    def _send_resolved(self, repository: str, revision: str, name: str) -> None:
        revision_files = self._commit(repository, revision)
        if revision_files is None or name not in revision_files[1]:
            self.send_head(404, 0, X_Error_Code="EntryNotFound")
            return
        commit, files = revision_files
        answer = self.state.answers.get(name)
        if answer is not None:
            answer(self)
        elif self.state.cdn and len(files[name]) > LARGE_BYTES:
            digest = hashlib.sha256(files[name]).hexdigest()
            location = f"{self.state.cdn}/{digest}?signature=abc"
            self.send_head(302, 0, Location=location, X_Repo_Commit=commit)
        else:
            self.send_data(files[name], X_Repo_Commit=commit)

    def _send_tree(self, repository: str) -> None:
        commits = self.state.commits.get(repository)
        if commits is None:
            self.send_head(404, 0, X_Error_Code="RepoNotFound")
            return
        files = commits[-1]
        listed = [
            {"type": "file", "path": name, "size": len(data), "oid": _git_digest(data)}
            for name, data in sorted(files.items())
        ]
        self._send_json(listed)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.calls.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = path.strip("/").split("/")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "verify" not in path:
            self.send_head(401, 0)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            front_matter = json.loads(body)["content"].split("---\n")[1]
            yaml.safe_load(front_matter)
            self._send_json({"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] > LARGE_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._send_json({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._send_batch(json.loads(body))
        elif path.startswith("/lfs/verify"):
            wanted = json.loads(body)
            is_whole = len(self.state.objects.get(wanted["oid"], b"")) == wanted["size"]
            self.send_head(200 if is_whole else 404, 0)
        elif "commit" in parts:
            self._make_commit("/".join(parts[2:4]), body)
        else:
            self.send_head(404, 0)

    def do_PUT(self) -> None:
        self.state.calls.append(f"PUT {self.path}")
        data = self._read_body()
        digest = self.path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() != digest:
            self.send_head(400, 0)
            return
        self.state.objects[digest] = data
        self.send_head(200, 0)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        data = b""
        while length := int(self.rfile.readline(), 16):
            data += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self._own_address()}/{name}"}
        if name in self.state.commits:
            self._send_json(url, status=409)
            return
        self.state.commits[name] = [{".gitattributes": b"*.safetensors filter=lfs\n"}]
        self._send_json(url)

    def _send_batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.state.objects:
                address = self._own_address()
                answer["actions"] = {
                    "upload": {"href": f"{address}/lfs/put/{item['oid']}"},
                    "verify": {"href": f"{address}/lfs/verify"},
                }
            objects.append(answer)
        self._send_json({"transfer": "basic", "objects": objects})

    def _make_commit(self, repository: str, body: bytes) -> None:
        files = dict(self.state.files(repository))
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commits = self.state.commits[repository]
        commits.append(files)
        commit = commit_id(len(commits) - 1)
        url = f"{self._own_address()}/{repository}/commit/{commit}"
        self._send_json({"commitUrl": url, "commitOid": commit})

    def _own_address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _send_json(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_head(status, len(data), Content_Type="application/json")
        self.wfile.write(data)


class CdnHandler(HostHandler):
    """Where the Hub's large files are, by their digests."""

    state: HubState

    def do_GET(self) -> None:
        request = self.request_seen()
        # What identifies the reader is for the Hub alone.
        assert "authorization" not in request.headers
        digest = urlsplit(self.path).path.strip("/")
        self.send_data(self.state.objects[digest])


@contextmanager
def serve_hub(folder: Path) -> Iterator[tuple[str, HubState]]:
    """Serve an empty Hub and its CDN; yield the Hub's address and its state."""
    state = HubState(folder)
    with serve(CdnHandler, state) as cdn, serve(HubHandler, state) as address:
        state.cdn = cdn
        yield address, state


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
