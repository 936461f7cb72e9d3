"""The status as metrics: read back by Prometheus' own parser, with hostile names, and named on the page."""

import re
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aggregator.monitoring.prometheus import Metric, MetricSample, prometheus_text
from aggregator.monitoring.silo_status import SiloStatus
from aggregator.monitoring.standing import STANDINGS, Arrival, SubmissionStatus
from aggregator.monitoring.status import Expiry, FederationStatus, ReleaseStatus
from aggregator.runtime.processes import Process, Processes
from ddm.protocol.base import now_utc
from ddm.system.processes import program
from tests.conftest import PublishedRelease

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "watch-a-federation.md"
HOSTILE = 'a"b\\c\nd} 1\n# TYPE x gauge\x1b[31m\u202e'
NOW = now_utc()


def silo(silo_id: str, **changes: object) -> SiloStatus:
    values: dict[str, object] = {
        "silo_id": silo_id,
        "standing": "working",
        "state": "training",
        "progress": 61,
        "code": 0,
        "person": "nobody",
        "last_seen": NOW - timedelta(seconds=14),
        "arrival": None,
        "submissions": (),
        "final": False,
    }
    return SiloStatus.model_validate(values | changes)


def federation_status(*silos: SiloStatus, name: str = "digits") -> FederationStatus:
    processes = Processes(
        running=True,
        started_at=NOW,
        programs=(
            Process(name=name, pid=7, alive=True, num_restarts=2),
            Process(name="intake", pid=None, alive=False),
        ),
    )
    release = ReleaseStatus(
        version=3,
        plan_id="digits-8f41c2d7",
        published_at=NOW,
        silos=("north",),
        missing_silos=(),
        withdrawn_silos=(),
        router="counts",
    )
    return FederationStatus(
        federation=name,
        address="fed.example.org:9092",
        at=NOW,
        plan_id="digits-8f41c2d7",
        processes=processes,
        silos=silos,
        router=None,
        releases=(release,),
        disk_free_bytes=2**45 + 1,
        disk_total_bytes=2**46,
        expiries=(Expiry(what="plan", at=NOW + timedelta(days=1)),),
        problems=("tls/server.pem: unreadable",),
    )


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read every sample, by its name and labels."""
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter")
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, "no series twice"
            samples[key] = sample.value
    return samples


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"archipelago_{name}", frozenset(labels.items())


def test_metrics_are_the_facts_of_the_status() -> None:
    arrival = Arrival(sequence=2, bytes_here=412, bytes_total=1100, bytes_per_s=24.8)
    submissions = (
        SubmissionStatus(sequence=1, verdict="refused"),
        SubmissionStatus(sequence=2, verdict="arrived"),
        SubmissionStatus(sequence=3, verdict="arrived"),
    )
    text = prometheus_text(
        federation_status(
            silo("north"),
            silo("south", standing="blocked", code=33, person="silo", progress=100),
            silo("east", arrival=arrival, submissions=submissions, last_seen=None),
        )
    )
    samples = parsed(text)
    expected: Mapping[tuple[str, frozenset[tuple[str, str]]], float] = {
        key("federation_info", federation="digits", plan="digits-8f41c2d7"): 1,
        key("status_timestamp_seconds"): NOW.timestamp(),
        key("running"): 1,
        key("process_alive", process="digits"): 1,
        key("process_alive", process="intake"): 0,
        key("process_restarts_total", process="digits"): 2,
        key("process_restarts_total", process="intake"): 0,
        key("release_version"): 3,
        key("disk_free_bytes"): 2**45 + 1,
        key("disk_size_bytes"): 2**46,
        key("expiry_timestamp_seconds", what="plan"): NOW.timestamp() + 86400,
        key("unreadable_files"): 1,
        **{key("silos", standing=standing): 0 for standing in STANDINGS},
        key("silos", standing="working"): 2,
        key("silos", standing="blocked"): 1,
        key("silos_waiting", person="silo"): 1,
        key("silos_waiting", person="aggregator"): 0,
        key("silo_last_seen_age_seconds", silo="north"): 14,
        key("silo_last_seen_age_seconds", silo="south"): 14,
        key("silo_training_progress_ratio", silo="north"): 0.61,
        key("silo_training_progress_ratio", silo="south"): 1,
        key("silo_training_progress_ratio", silo="east"): 0.61,
        key("silo_exit_code", silo="north"): 0,
        key("silo_exit_code", silo="south"): 33,
        key("silo_exit_code", silo="east"): 0,
        key("silo_arrived_bytes", silo="east"): 412,
        key("silo_announced_bytes", silo="east"): 1100,
    }
    of_submissions = {
        one: value for one, value in samples.items() if one[0] == "archipelago_silo_submissions"
    }
    assert {one: samples[one] for one in samples.keys() - of_submissions.keys()} == expected
    assert len(of_submissions) == 3 * 6
    assert of_submissions[key("silo_submissions", silo="east", verdict="arrived")] == 2
    assert of_submissions[key("silo_submissions", silo="east", verdict="refused")] == 1
    assert sum(of_submissions.values()) == 3


def test_names_that_others_chose_add_no_line_and_come_back_as_text() -> None:
    # A silo's name is checked when a document is read; the text does not rely on that.
    hostile = silo("north").model_copy(update={"silo_id": HOSTILE})
    plain = prometheus_text(federation_status(silo("north")))
    text = prometheus_text(federation_status(hostile, name=HOSTILE))
    assert len(text.splitlines()) == len(plain.splitlines())
    shown = 'a"b\\c\\nd} 1\\n# TYPE x gauge\\x1b[31m\\u202e'
    samples = parsed(text)
    assert samples[key("silo_exit_code", silo=shown)] == 0
    assert samples[key("process_alive", process=shown)] == 1
    assert not any(name == "x" for name, _ in samples)


def test_page_names_exactly_the_metrics_with_their_labels() -> None:
    arrival = Arrival(sequence=1, bytes_here=1, bytes_total=2, bytes_per_s=0.0)
    samples = parsed(prometheus_text(federation_status(silo("north", arrival=arrival))))
    labels_by_name = {name: {label for label, _ in labels} for name, labels in samples}
    page = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `(archipelago_\w+)` \|([^|]*)\|", page, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows} == labels_by_name
    (sentence,) = re.findall(r"`standing` has the values of `--json`: ([^.]*)\.", page)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(STANDINGS)


def test_command_prints_the_metrics_alone(published: PublishedRelease) -> None:
    command = [str(program("aggregator")), "status", str(published.tiny.federation.path)]
    process = subprocess.run([*command, "--metrics"], capture_output=True, text=True, check=True)
    samples = parsed(process.stdout)
    assert samples[key("silos", standing="accepted")] == 2
    assert samples[key("release_version")] == 1
    assert process.stdout.endswith("\n") and not process.stdout.endswith("\n\n")
    refused = subprocess.run(
        [*command, "--metrics", "--json"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 3 and "--json and --metrics" in refused.stderr


@pytest.mark.parametrize("value", [0.1, 1e-9, 12345.678, 2.0**60])
def test_numbers_lose_no_digit(value: float) -> None:
    lines = Metric("archipelago_trial", "A trial.", (MetricSample(value, {}),)).lines()
    assert list(parsed("".join(f"{line}\n" for line in lines)).values()) == [value]
