"""Makes a federation without training: folders, keys and synthetic files, with the real Flower."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.runtime.flower import FlowerRuntime
from aggregator.transfer.settings import RunSettings
from ddm.system.processes import free_port
from ddm.system.supervisor import Program
from silo.courier.supernode import Courier

_BLOCK_BYTES = 64 * 1024**2


def write_random(path: Path, num_bytes: int) -> None:
    """Write a file of random bytes, which cannot be compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(num_bytes)
    with path.open("wb") as handle:
        while num_bytes:
            block = generator.bytes(min(num_bytes, _BLOCK_BYTES))
            num_bytes -= handle.write(block)


def submit(site: Path, plan_id: str, silo_id: str, expert: Path) -> None:
    """Put a submission with one file, moved here, into the outbox at once."""
    part = site / "outbox" / plan_id / ".1.part"
    (part / "silos" / silo_id).mkdir(parents=True)
    (part / "silos" / silo_id / "submission.json").write_bytes(os.urandom(1500))
    expert.rename(part / "silos" / silo_id / "expert.safetensors")
    part.rename(part.with_name("1"))
    status = {"plan_id": plan_id, "state": "in_outbox", "progress": 100, "sequence": 1}
    (site / "outbox" / "status.json").write_text(json.dumps(status))


@contextmanager
def running(
    fed: Path,
    sites: Mapping[str, Path],
    keys: Mapping[str, str],
    *,
    plan_id: str,
    port: int | None = None,
    address: str | None = None,
    nginx: Path | None = None,
    beside: Sequence[Program] = (),
    **settings: Any,
) -> Iterator[Callable[[Callable[[], bool], float], None]]:
    """Run Flower for a federation; yield a function that waits for a condition while it checks every process."""
    port = port or free_port()
    with ExitStack() as stack:
        couriers = [
            stack.enter_context(
                Courier(site, address=address or f"127.0.0.1:{port}", max_bundle_bytes=2**32)
            )
            for site in sites.values()
        ]
        run_settings = RunSettings(plan_id=plan_id, nodes=dict(keys), **settings)
        runtime = stack.enter_context(
            FlowerRuntime(
                fed, run_settings, host="127.0.0.1", port=port, nginx=nginx, beside=beside
            )
        )

        def wait(condition: Callable[[], bool], timeout_s: float) -> None:
            deadline = time.monotonic() + timeout_s
            while not condition():
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"expected the condition within {timeout_s:.0f} s, got no change; see flower/logs/"
                    )
                runtime.check()
                for courier in couriers:
                    courier.check()
                time.sleep(0.05)

        yield wait
