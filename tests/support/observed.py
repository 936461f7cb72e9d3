"""Everything that the aggregator sees of a site's work on one plan, without what differs in any two runs."""

import json
from dataclasses import dataclass
from typing import Any

from silo.worker.worker import Worker
from tests.support.federation import TinyFederation

# Names of the plan, times, and a ledger whose digests are of random numbers.
_OF_ONE_RUN = ("plan_id", "plan_digest", "root_digest", "created_at", "ledger", "approval")


@dataclass(frozen=True)
class Observation:
    """What leaves a site, but for noise, weights, times and the plan's names.

    Attributes:
        statuses: every status on the way, with its exit code; None while there is none.
        files: path and size of each file that is sent beside the submission.
        submission: the document.
    """

    statuses: tuple[dict[str, Any] | None, ...]
    files: tuple[tuple[str, int], ...]
    submission: dict[str, Any]


def observe(tiny: TinyFederation, silo_id: str, plan_id: str) -> Observation:
    """Let a site work on a plan until its submission is in the outbox, and return what its courier sends."""
    tiny.deliver_plan(silo_id, plan_id)
    site = tiny.sites[silo_id]
    statuses: list[dict[str, Any] | None] = []
    worker = Worker(site, tiny.key(silo_id), lambda state: None)
    worker.begin()
    while worker.state.state != "in_outbox":
        before = worker.state
        worker.step()
        status_path = site.outbox / "status.json"
        status = None
        if status_path.exists():
            status = json.loads(status_path.read_bytes()) | {"plan_id": ""}
        statuses.append(status)
        assert worker.state != before, f"the site stands still in {before.state}: {before.problem}"

    sent = site.outbox / plan_id / "1"
    files = [
        (path.relative_to(sent).as_posix(), path.stat().st_size)
        for path in sent.rglob("*.safetensors")
    ]
    submission = json.loads((sent / "silos" / silo_id / "submission.json").read_bytes())
    return Observation(tuple(statuses), tuple(sorted(files)), _of_every_run(submission))


def _of_every_run(submission: dict[str, Any]) -> dict[str, Any]:
    """Return the submission without what differs in any two runs."""
    kept = {name: value for name, value in submission.items() if name not in _OF_ONE_RUN}
    for expert in kept["experts"]:
        expert["file"]["digest"] = ""
        expert["training"]["seconds"] = ""
    for statistic in kept["statistics"]:
        statistic["file"]["digest"] = ""
    # The report has a random number, and the waiver names the plan and a day.
    kept["audit"]["digest"] = ""
    kept["audit"]["waiver"] |= {"plan_digest": "", "expires_at": ""}
    return kept
