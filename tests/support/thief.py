"""A thief of TUF keys: changes metadata of a release on a host, and signs them with the keys that were stolen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuf.api.metadata import Metadata

from ddm.protocol.base import sha256_hex
from ddm.trust.keys import SigningKey
from ddm.trust.metadata import attach, payload_of


def forge_metadata(path: Path, key: SigningKey, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the signed part of a metadata file, and sign it again with one key."""
    document = json.loads(path.read_bytes())
    change(document["signed"])
    document["signatures"] = []
    signed = Metadata[Any].from_dict(document).signed
    path.write_bytes(attach(signed, {key.public: key.sign(payload_of(signed))}))


def list_again(metadata: Path, online: SigningKey, *names: str, **versions: int) -> None:
    """Sign snapshot and timestamp over changed files, as the thief of the online key does.

    Args:
        metadata: the folder.
        online: the stolen key.
        names: the changed files, whose entries in the snapshot are written anew.
        versions: of `snapshot` and of `timestamp`; the present ones when omitted.
    """

    def entry(name: str) -> dict[str, Any]:
        data = (metadata / name).read_bytes()
        version = json.loads(data)["signed"]["version"]
        return {"version": version, "length": len(data), "hashes": {"sha256": sha256_hex(data)}}

    def snapshot(signed: dict[str, Any]) -> None:
        signed["meta"].update({name: entry(name) for name in names})
        signed["version"] = versions.get("snapshot", signed["version"])

    def timestamp(signed: dict[str, Any]) -> None:
        signed["meta"]["snapshot.json"] = entry("snapshot.json")
        signed["version"] = versions.get("timestamp", signed["version"])

    forge_metadata(metadata / "snapshot.json", online, snapshot)
    forge_metadata(metadata / "timestamp.json", online, timestamp)
