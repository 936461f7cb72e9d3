"""Reads the facts of a site and its machine; it changes nothing, and opens neither key nor image."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddm.errors import ArchipelagoError, SetupError
from ddm.images.text_reader import reader_path
from ddm.io.files import read_bounded, require_file
from ddm.io.space import check_writable, free_bytes
from ddm.system.cores import usable_cores
from ddm.system.findings import Attempts
from ddm.system.memory import available_bytes
from ddm.system.requirements import check_packages
from silo.check.launcher import LauncherFacts, find_launcher
from silo.check.rules import PathMode, SiteFacts
from silo.check.torch_build import has_nvidia_gpu, read_torch_build
from silo.config import Policy, SiloSettings, Site
from silo.courier.clock import seconds_ahead
from silo.courier.reach import proxy_for, try_connection, without_password
from silo.decisions import DecisionLog
from silo.privacy.holder import open_ledger
from silo.worker.state import State, load_state, state_path

_MAX_SMALL_BYTES = 1 << 20
# Permissions that a path must not give: to everybody but its owner, and to everybody but owner and group.
_NOT_OWNER = 0o077
_NOT_GROUP = 0o007
_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


def read_machine() -> SiteFacts:
    """Read what the machine has, without a site."""
    return SiteFacts(
        packages=tuple(check_packages()),
        torch=read_torch_build(),
        # The driver alone is no GPU for training: a torch built without CUDA finds none on a machine that has one.
        has_gpu=has_nvidia_gpu(),
        # Not `os.cpu_count()`: a container or a scheduler may allow this process only some of the cores.
        num_cores=usable_cores(),
        memory_bytes=available_bytes(),
        has_text_reader=reader_path() is not None,
    )


class SiteFactsReader:
    """Reads facts; whatever cannot be read becomes an error of its check instead.

    Args:
        site: the site's folder.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._attempts = Attempts()
        self._try = self._attempts.read

    def facts(self) -> SiteFacts:
        """Read everything."""
        site = self._site
        settings = self._try("configuration", site.settings)
        policy = self._try("configuration", site.policy)
        state = self._try("work", lambda: load_state(state_path(site.private)))
        self._try("disk", self._check_writable)
        self._try("data", lambda: self._check_data(settings))
        # Each check fails for itself, so that one report names everything that is wrong.
        self._try("decisions", self._check_decisions)
        launcher = None
        ahead_s = None
        connection = None
        proxy = None
        if settings is not None:
            launcher = self._try("launcher", lambda: self._find_launcher(settings))
            # Two connections: the first one accepts any certificate, since a wrong clock alone can make the right one
            # seem expired.
            ahead_s = seconds_ahead(settings.address)
            connection = try_connection(settings.address, site.courier / "ca.pem")
            host, _, _ = settings.address.rpartition(":")
            proxy = without_password(proxy_for(host))
        return replace(
            read_machine(),
            settings=settings,
            policy=policy,
            launcher=launcher,
            disk_bytes=self._try("disk", lambda: free_bytes(site.private)) or 0,
            ahead_s=ahead_s,
            connection=connection,
            proxy=proxy,
            modes=tuple(self._modes(settings)),
            key_encrypted=self._try("keys", self._key_encrypted),
            root_digest=self._try("keys", lambda: site.root_digest),
            isolation=self._try("isolation", lambda: site.isolation) or "none",
            epsilon_left=self._try("ledger", lambda: self._epsilon_left(policy)),
            running=self._is_running(),
            problem=_problem(state),
            errors=self._attempts.errors,
        )

    def _check_writable(self) -> None:
        folders = [self._site.private, self._site.outbox]
        check_writable([folder for folder in folders if folder.exists()])

    def _find_launcher(self, settings: SiloSettings) -> LauncherFacts | None:
        # Not this process's user, which may be root's.
        worker = self._site.private.stat().st_uid
        return find_launcher(settings.training, worker)

    def _check_decisions(self) -> None:
        log = DecisionLog(self._site)
        if log.folder.exists():
            _ = log.entries  # reading verifies them

    def _check_data(self, settings: SiloSettings | None) -> None:
        if settings is None:
            return
        path = Path(settings.data)
        if not path.exists():
            raise SetupError(
                str(path),
                expected="the images that silo.toml names",
                got="nothing there",
                remedy="Set data in silo.toml to where the images are, or mount them.",
            )
        # Opened and closed again: whether this user may read it, without reading anything.
        with path.open("rb") if path.is_file() else os.scandir(path):
            pass

    def _key_encrypted(self) -> bool:
        site = self._site
        key_path = require_file(
            site.key_path,
            "this site's signing key",
            "Restore private/silo.key from backup. Without it the silo must be enrolled again.",
        )
        # Where worker and courier are two users, the worker's user cannot look into the courier's folder.
        if not site.hides_courier():
            require_file(
                site.courier / "node.key",
                "this site's node key",
                "Restore courier/node.key from backup.",
            )
        # Raises where the secret is missing; its value is not needed here.
        site.salt()
        return read_bounded(key_path, _MAX_SMALL_BYTES).lstrip().startswith(_ENCRYPTED)

    def _modes(self, settings: SiloSettings | None) -> Iterator[PathMode]:
        site = self._site
        forbidden = {
            site.inbox: _NOT_GROUP,
            site.outbox: _NOT_GROUP,
            site.private: _NOT_OWNER,
            site.courier: _NOT_OWNER,
            site.key_path: _NOT_OWNER,
            site.courier / "node.key": _NOT_OWNER,
        }
        if not site.in_container():  # which makes the folder for what it mounts there
            forbidden[site.path] = _NOT_GROUP
        if settings is not None:
            ledger_folder = site.ledger_folder_in(settings)
            forbidden[ledger_folder] = _NOT_OWNER
            forbidden[ledger_folder / "dataset.salt"] = _NOT_OWNER
            if settings.passphrase_file:
                forbidden[Path(settings.passphrase_file)] = _NOT_OWNER
        # A path that is absent, or in a folder that this user may not enter, is reported by the check that needs it.
        for path, forbidden_bits in forbidden.items():
            with suppress(OSError):
                yield PathMode(str(path), stat.S_IMODE(path.stat().st_mode), forbidden_bits)

    def _epsilon_left(self, policy: Policy | None) -> float | None:
        if policy is None:
            return None
        return open_ledger(self._site, policy).left()

    def _is_running(self) -> bool:
        """Whether the process that the last run noted is alive and works on this site."""
        # The number may have been given to another program since, hence the look at its command line.
        with suppress(ArchipelagoError, OSError, ValueError, KeyError, TypeError):
            data = read_bounded(self._site.private / "processes.json", _MAX_SMALL_BYTES)
            process_id = int(json.loads(data)["worker"])
            return b"silo" in Path(f"/proc/{process_id}/cmdline").read_bytes()
        return False


def _problem(state: State | None) -> str | None:
    if state is None or state.problem is None:
        return None
    return f"{state.problem.message} (code {state.problem.code})"
