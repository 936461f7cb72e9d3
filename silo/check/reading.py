"""Gathers the facts of a site and its machine; it changes nothing, and opens neither key nor image."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddm.errors import ArchipelagoError, SetupError
from ddm.images.text_reader import reader_path
from ddm.io.files import read_bounded, require_file
from ddm.io.space import check_writable, free_bytes
from ddm.protocol.base import sha256_hex
from ddm.system.findings import Attempts
from ddm.system.memory import available_bytes
from ddm.system.requirements import check_packages
from silo.check.launcher import find_launcher
from silo.check.rules import PathMode, SiteFacts
from silo.config import Policy, SiloSettings, Site
from silo.courier.clock import seconds_ahead
from silo.courier.reach import proxy_for, shown, try_connection
from silo.decisions import DecisionLog
from silo.privacy.holder import open_ledger
from silo.worker.state import State, load_state, state_path

_MAX_SMALL_BYTES = 1 << 20
_PRIVATE, _OTHERS = 0o077, 0o007
_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


class SiteFactsReader:
    """Gathers facts; whatever cannot be read becomes an error of its check instead.

    Args:
        site: the site's folder.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._attempts = Attempts()
        self._try = self._attempts.read

    def facts(self) -> SiteFacts:
        """Gather everything."""
        site = self._site
        settings = self._try("configuration", site.settings)
        policy = self._try("configuration", site.policy)
        state = self._try("work", lambda: load_state(state_path(site.private)))
        self._try(
            "disk",
            lambda: check_writable([each for each in (site.private, site.outbox) if each.exists()]),
        )
        self._try("data", lambda: self._data(settings))
        self._try(
            "decisions",
            lambda: DecisionLog(site).entries if DecisionLog(site).folder.exists() else (),
        )
        address = settings.address if settings else None
        num_gpus, has_gpu = _gpus()
        return SiteFacts(
            settings=settings,
            policy=policy,
            packages=tuple(check_packages()),
            num_gpus=num_gpus,
            has_gpu=has_gpu,
            num_cores=len(os.sched_getaffinity(0)),
            launcher=self._try("launcher", lambda: find_launcher(settings.training))
            if settings
            else None,
            memory_bytes=available_bytes(),
            disk_bytes=self._try("disk", lambda: free_bytes(site.private)) or 0,
            ahead_s=seconds_ahead(address) if address else None,
            connection=try_connection(address, site.courier / "ca.pem") if address else None,
            proxy=shown(proxy_for(address.rpartition(":")[0])) if address else None,
            modes=tuple(self._modes(settings)),
            key_encrypted=self._try("keys", self._key_encrypted),
            root_digest=self._try("keys", self._root_digest),
            isolation=self._try("isolation", lambda: site.isolation) or "none",
            spent=self._try("ledger", lambda: self._spent(policy)),
            running=self._running(),
            problem=_problem(state),
            has_text_reader=reader_path() is not None,
            errors=self._attempts.errors,
        )

    def _data(self, settings: SiloSettings | None) -> None:
        if settings is None:
            return
        path = Path(settings.data)
        if not path.exists():
            remedy = "Set data in silo.toml to where the images are, or mount them."
            raise SetupError(
                str(path),
                expected="the images that silo.toml names",
                got="nothing there",
                remedy=remedy,
            )
        with path.open("rb") if path.is_file() else os.scandir(path):
            pass

    def _key_encrypted(self) -> bool:
        remedy = "Restore private/silo.key from backup. Without it the silo must be enrolled anew."
        found = require_file(self._site.key_path, "this site's signing key", remedy)
        if not self._site.hides_courier():
            node_key = self._site.courier / "node.key"
            require_file(node_key, "this site's node key", "Restore courier/node.key from backup.")
        self._site.salt()
        return read_bounded(found, _MAX_SMALL_BYTES).lstrip().startswith(_ENCRYPTED)

    def _root_digest(self) -> str:
        remedy = "Restore private/trust/ from backup."
        return sha256_hex(
            read_bounded(
                require_file(self._site.root_path, "the pinned root", remedy), _MAX_SMALL_BYTES
            )
        )

    def _modes(self, settings: SiloSettings | None) -> Iterator[PathMode]:
        site = self._site
        places = [(site.inbox, _OTHERS), (site.outbox, _OTHERS), (site.private, _PRIVATE)]
        if not site.in_container():  # which makes the folder for what it mounts there
            places.insert(0, (site.path, _OTHERS))
        places += [
            (each, _PRIVATE) for each in (site.courier, site.key_path, site.courier / "node.key")
        ]
        if settings:
            folder = site.ledger_folder_in(settings)
            places += [(folder, _PRIVATE), (folder / "dataset.salt", _PRIVATE)]
        if settings and settings.passphrase_file:
            places.append((Path(settings.passphrase_file), _PRIVATE))
        for path, forbidden in places:
            with suppress(OSError):
                yield PathMode(str(path), stat.S_IMODE(path.stat().st_mode), forbidden)

    def _spent(self, policy: Policy | None) -> tuple[float, float] | None:
        if policy is None:
            return None
        return open_ledger(self._site, policy).spent()

    def _running(self) -> bool:
        """Whether the process that the last run noted is alive and works on this site."""
        with suppress(ArchipelagoError, OSError, ValueError, KeyError, TypeError):
            noted = json.loads(
                read_bounded(self._site.private / "processes.json", _MAX_SMALL_BYTES)
            )
            return b"silo" in Path(f"/proc/{int(noted['worker'])}/cmdline").read_bytes()
        return False


def _gpus() -> tuple[int | None, bool]:
    """Return how many GPUs torch sees, None where it cannot be loaded, and whether the machine has one of NVIDIA's."""
    there = Path("/proc/driver/nvidia/version").exists()
    try:
        import torch
    except (ImportError, OSError):
        return None, there
    return torch.cuda.device_count() if torch.cuda.is_available() else 0, there


def _problem(state: State | None) -> str | None:
    if state is None or state.problem is None:
        return None
    return f"{state.problem.message} (code {state.problem.code})"
