"""A federation at work: Flower's programs beside this process, which takes in what they bring."""

import json
import signal
import threading
from types import FrameType

from aggregator.config import Federation, check_exposure
from aggregator.intake import submission_bytes
from aggregator.registry import card_of
from aggregator.runtime import FlowerRuntime
from aggregator.taking_in import IntakeDesk
from ddm.console import say
from ddm.errors import DocumentError
from ddm.files import write_atomic
from ddm.protocol.base import check_json
from ddm.protocol.plan import Plan
from ddm.protocol.receipt import Accepted, Receipt
from ddm.trust.keys import SigningKey

CHECK_S = 1.0


def run_federation(federation: Federation, receipt_key: SigningKey) -> None:
    """Carry the plan out and the submissions in; returns when every silo has its receipt.

    Raises:
        BusyError: the port is taken, or another process runs this federation.
        TransportError: Flower failed in a way that restarts did not mend.
        KeyboardInterrupt: a signal; everything so far is on disk.
    """
    plan, _ = federation.current_plan()
    settings = federation.settings()
    check_exposure(settings)
    desk = IntakeDesk(federation, receipt_key, _say_verdict)
    news = SiloNews(federation, plan)
    say(f"Plan {plan.plan_id}: waiting for {', '.join(plan.silos)} at {settings.host}:{settings.port}")
    with (
        desk.locked(),
        FlowerRuntime(
            federation.path,
            host=settings.host,
            port=settings.port,
            plan_id=plan.plan_id,
            nodes={silo_id: card_of(federation, silo_id).node_key for silo_id in plan.silos},
            shard_bytes=settings.shard_bytes,
            max_submission_bytes=submission_bytes(plan),
        ) as runtime,
    ):
        # Only from here on: while Flower starts, a signal need not wait for it.
        stop = _stop_on_signals()
        while not runtime.finished:
            if stop.wait(CHECK_S):
                raise KeyboardInterrupt
            desk.step()
            runtime.check()
            write_atomic(federation.path / "flower" / "info.json", json.dumps(runtime.info()).encode())
            news.tell()
    say(f"Every silo has its receipt: {', '.join(plan.silos)}. Next: aggregator router, then aggregator publish.")


class SiloNews:
    """Prints what silos report, each piece of news once."""

    def __init__(self, federation: Federation, plan: Plan) -> None:
        self._folder = federation.incoming / plan.plan_id
        self._silos = plan.silos
        self._told: dict[str, str] = {}

    def tell(self) -> None:
        """Print what changed since the last time."""
        for silo_id in self._silos:
            news = self._read(silo_id)
            if news and news != self._told.get(silo_id):
                self._told[silo_id] = news
                say(f"[{silo_id}] {news}")

    def _read(self, silo_id: str) -> str:
        path = self._folder / silo_id / "status.json"
        try:
            status = check_json(path.read_bytes(), subject="status", limit=65536)
        except (FileNotFoundError, DocumentError):
            return ""
        state = str(status.get("state", ""))
        return f"{state} {status.get('progress')}%" if state == "training" else state


def _say_verdict(receipt: Receipt) -> None:
    if isinstance(receipt.verdict, Accepted):
        say(f"[{receipt.silo_id}] submission {receipt.sequence} accepted")
    else:
        say(f"[{receipt.silo_id}] submission {receipt.sequence} REFUSED: {receipt.verdict.reason}")


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()

    def request(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request)
    return stop
