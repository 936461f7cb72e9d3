"""A federation at work: Flower's programs and intake beside this process, which keeps them alive and prints news."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from aggregator.config import Federation
from aggregator.intake.attempts import MAX_ATTEMPTS_OF_SILO
from aggregator.intake.limits import bytes_to_come, submission_bytes
from aggregator.membership.registry import active_cards, read_cards
from aggregator.runtime.flower import FlowerRuntime
from aggregator.runtime.proxy import choose_proxy
from aggregator.transfer.receipts_folder import is_plan_finished
from aggregator.transfer.settings import RunSettings
from ddm.errors import ArchipelagoError, DocumentError, SetupError
from ddm.io.files import write_atomic
from ddm.io.locks import locked
from ddm.io.space import check_writable, require_free_space
from ddm.protocol.base import check_json
from ddm.protocol.enrolment import Card
from ddm.protocol.plan import Plan
from ddm.system.logs import LogOptions, replay
from ddm.system.processes import Child, spawn
from ddm.system.signals import stop_on_signals
from ddm.system.supervisor import MAX_PER_HOUR, HeartbeatFile, Program

CHECK_S = 1.0
_MAX_NEWS_BYTES = 65536
_log = logging.getLogger(__name__)


def run_federation(federation: Federation, passphrase: bytes) -> Plan:
    """Carry the plan out and the submissions in; return the plan when every silo has its receipt.

    Args:
        federation: the operator's folder.
        passphrase: opens the key that signs receipts; intake gets it through a pipe.

    Raises:
        BusyError: the port is taken, or another process runs this federation.
        DiskError: a folder cannot be written, or the disk has no room for the submissions still to come.
        MissingFileError: others can reach the address, and nginx is not installed.
        TransportError: a program failed, and restarts did not help.
        KeyboardInterrupt: a signal; everything so far is on disk.
    """
    plan, _ = federation.current_plan()
    settings = federation.settings()
    nginx = choose_proxy(settings.host)
    _check_disk(federation, plan)
    # Intake holds this lock from its start on; held by another process, it would keep ours from starting.
    federation.accepted.mkdir(parents=True, exist_ok=True)
    with locked(federation.accepted, "intake"):
        pass
    silos_now = dict(active_cards(federation, plan))
    if not silos_now:
        raise SetupError(
            f"plan {plan.plan_id}",
            expected="a silo in it",
            got="silos all removed",
            remedy="Sign another plan: `aggregator plan FED --recipe FILE --public FILE`.",
        )
    if nginx is None:
        _log.warning(
            "nginx is not installed: Flower's own server takes the address, which only this machine reaches."
        )
    silo_news = SiloNews(federation, plan)
    intake_news = IntakeNews(federation.path / "flower" / "logs" / "intake.log")
    _log.info(
        "Plan %s: waiting for %s at %s:%d",
        plan.plan_id,
        ", ".join(plan.silos),
        settings.host,
        settings.port,
    )
    others = _other_silos(federation, plan)
    reached_silos = silos_now | others
    run_settings = RunSettings(
        plan_id=plan.plan_id,
        nodes={silo_id: card.node_key for silo_id, card in reached_silos.items()},
        receipts_only=tuple(sorted(others)),
        carried_from={carried.silo_id: carried.plan_id for carried in plan.carried},
        shard_bytes=settings.shard_bytes,
        max_submission_bytes=submission_bytes(plan),
    )
    runtime = FlowerRuntime(
        federation.path,
        run_settings,
        host=settings.host,
        port=settings.port,
        nginx=nginx,
        beside=(intake_program(federation, plan, passphrase),),
    )
    # Signals are handled once Flower has started: until then, one need not wait for it.
    with runtime, stop_on_signals() as stop, ExitStack() as stack:
        # Before signals act again: a second Ctrl-C changes nothing.
        stack.callback(runtime.stop)
        restart_news = RestartNews(runtime)
        newcomers = Newcomers(federation, plan, runtime)
        while not (runtime.finished or _all_done(federation, plan)):
            if stop.wait(CHECK_S):
                raise KeyboardInterrupt
            runtime.check()
            # On a full disk the next second tries again.
            with suppress(OSError):
                info = json.dumps(runtime.info()).encode()
                write_atomic(federation.path / "flower" / "info.json", info)
            newcomers.let_in()
            for news in (silo_news, intake_news, restart_news):
                news.log_new()
        # The last verdict is logged just before the last receipt, which ends the loop.
        intake_news.log_new()
    return plan


def _other_silos(federation: Federation, plan: Plan) -> dict[str, Card]:
    """Return the cards of silos that the plan does not name.

    They get receipts for earlier plans, and may stay connected until a plan names them: turned away, they would look
    for a fault in their keys.
    """
    return {
        silo_id: card
        for silo_id, card in read_cards(federation).items()
        if silo_id not in plan.silos
    }


def _check_disk(federation: Federation, plan: Plan) -> None:
    """Find a read-only or full disk before a silo begins to train.

    Raises:
        DiskError: names the folder, and what is missing.
    """
    written = [
        federation.path,
        federation.incoming,
        federation.accepted,
        federation.receipts,
        federation.registry,
    ]
    written.append(federation.path / "flower")
    for folder in written:
        # The check names the folder that cannot be made.
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    check_writable(written)
    # One half is for what arrives, the other for the verified copy; they may be on different disks.
    half = bytes_to_come(federation, plan) // 2
    purpose = f"the submissions to plan {plan.plan_id} that are still to come"
    require_free_space({federation.incoming: half, federation.accepted: half}, purpose)


def _all_done(federation: Federation, plan: Plan) -> bool:
    """Whether nothing is left to do for those who take part by now: a silo may have been removed meanwhile."""
    return is_plan_finished(federation.path, plan.plan_id, list(active_cards(federation, plan)))


def intake_program(federation: Federation, plan: Plan, passphrase: bytes) -> Program:
    """Describe intake to the supervisor; the passphrase opens the key that signs receipts."""
    flower = federation.path.absolute() / "flower"
    command = [
        sys.executable,
        "-P",
        "-m",
        "aggregator.runtime.intake_process",
        str(federation.path.absolute()),
        plan.plan_id,
    ]

    def start() -> Child:
        return spawn(
            command,
            log_path=flower / "logs" / "intake.log",
            env={**os.environ, **_intake_logging().environment()},
            input_bytes=passphrase,
        )

    # Every silo may use up its own attempts, and anybody who speaks in its name as many: all of them together do not
    # end the others' federation.
    max_per_hour = MAX_PER_HOUR + 2 * MAX_ATTEMPTS_OF_SILO * len(plan.silos)
    heartbeat = HeartbeatFile(flower / "intake.alive")
    return Program("intake", start, works=heartbeat.beats, max_per_hour=max_per_hour)


def _intake_logging() -> LogOptions:
    """Return how intake logs: as this process does, but as JSON where `replay` must find time, level and logger."""
    options = LogOptions.from_environment()
    return LogOptions(options.verbose, as_json=options.verbose or options.as_json)


class NodeRegistrar(Protocol):
    """Flower's programs, as far as they take node keys."""

    def register(self, nodes: Mapping[str, str]) -> None:
        """Let nodes connect, by silo id and OpenSSH public key."""


class Newcomers:
    """Lets silos connect that were enrolled since the run began, although no message is for them before a plan is.

    Args:
        federation: the operator's folder.
        plan: the plan in force.
        registrar: takes their node keys.
    """

    def __init__(self, federation: Federation, plan: Plan, registrar: NodeRegistrar) -> None:
        self._federation = federation
        self._plan = plan
        self._registrar = registrar
        self._seen_files = self._card_files()

    def let_in(self) -> None:
        """Register the nodes of new cards; a card that fails is tried again with the next run."""
        files = self._card_files()
        if files == self._seen_files:
            return
        self._seen_files = files
        try:
            cards = _other_silos(self._federation, self._plan)
            self._registrar.register({silo_id: card.node_key for silo_id, card in cards.items()})
        except ArchipelagoError as error:
            _log.warning("a silo that was enrolled just now cannot connect yet: %s", error)
            return
        _log.info("enrolled and not named by this plan: %s", ", ".join(cards) or "none")

    def _card_files(self) -> frozenset[str]:
        return frozenset(path.name for path in self._federation.registry.glob("*.json"))


class SiloNews:
    """Logs what silos report, each piece of news once."""

    def __init__(self, federation: Federation, plan: Plan) -> None:
        self._folder = federation.incoming / plan.plan_id
        self._silos = plan.silos
        self._last: dict[str, str] = {}

    def log_new(self) -> None:
        """Log what changed since the last time."""
        for silo_id in self._silos:
            news = self._read(silo_id)
            if news and news != self._last.get(silo_id):
                self._last[silo_id] = news
                _log.info("[%s] %s", silo_id, news)

    def _read(self, silo_id: str) -> str:
        path = self._folder / silo_id / "status.json"
        try:
            status = check_json(path.read_bytes(), subject="status", limit=65536)
        except (FileNotFoundError, DocumentError):
            return ""
        news = str(status.get("state", ""))
        if news == "training":
            news += f" {status.get('progress')}%"
        code = status.get("code")
        if code:
            news += f", needs a person there (code {code})"
        return news


class RestartNews:
    """Logs which programs were started again."""

    def __init__(self, runtime: FlowerRuntime) -> None:
        self._runtime = runtime
        self._last = runtime.num_restarts()

    def log_new(self) -> None:
        """Log what changed since the last time."""
        restarts = self._runtime.num_restarts()
        for name, num in restarts.items():
            if num != self._last[name]:
                _log.warning(
                    "[%s] ended or hung, and was started again (%d times so far)", name, num
                )
        self._last = restarts


class IntakeNews:
    """Logs what intake adds to its own log, from now on.

    Args:
        path: the log; `ddm.system.guard` begins a new one when it is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = path.stat().st_size if path.is_file() else 0

    def log_new(self) -> None:
        """Log the lines that were finished since the last time."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as log:
            # A new log took the place of a full one.
            if self._path.stat().st_size < self._read_bytes:
                self._read_bytes = 0
            log.seek(self._read_bytes)
            block = log.read(_MAX_NEWS_BYTES)
        lines, newline, _ = block.rpartition(b"\n")
        if not newline and len(block) == _MAX_NEWS_BYTES:
            # A line longer than a block has no end here. Without this, no later line would ever be logged.
            lines = block
        self._read_bytes += len(lines) + len(newline)
        for line in lines.decode(errors="replace").splitlines():
            if not replay(line):
                _log.info("%s", line)
