"""Writes a status as Prometheus' text format, exposition format 0.0.4: the same facts as `aggregator status --json`.

Names and meanings are in docs/how-to/watch-a-federation.md, which a test compares with this file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from aggregator.monitoring.silo_status import SiloStatus
from aggregator.monitoring.standing import STANDINGS, Person, SubmissionVerdict
from aggregator.monitoring.status import FederationStatus
from ddm.system.escape import escape_control

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The backslash comes first, or that of an escaped quotation mark would be doubled.
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'))


@dataclass(frozen=True)
class MetricSample:
    """One value of a metric, and the labels that tell it from the metric's other values."""

    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """A metric: its name, what it means, and its values."""

    name: str
    meaning: str
    samples: tuple[MetricSample, ...]
    kind: Literal["gauge", "counter"] = "gauge"

    def lines(self) -> Iterator[str]:
        """Yield its lines."""
        yield f"# HELP {self.name} {self.meaning}"
        yield f"# TYPE {self.name} {self.kind}"
        for sample in self.samples:
            labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sample.labels.items())
            in_braces = f"{{{labels}}}" if labels else ""
            # The shortest text that reads as the same number; whole ones, such as sizes, without a point.
            yield f"{self.name}{in_braces} {sample.value!r}"


def prometheus_text(status: FederationStatus) -> str:
    """Return a status as Prometheus reads it, with a line break at its end."""
    metrics = [*_federation_metrics(status), *_silo_metrics(status)]
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _federation_metrics(status: FederationStatus) -> Iterator[Metric]:
    processes = status.processes
    plan_id = status.plan_id or ""
    names = {"federation": status.federation, "plan": plan_id}
    yield Metric(
        "archipelago_federation_info",
        "The federation and its current plan; always 1.",
        (MetricSample(1, names),),
    )
    yield _unlabelled_metric(
        "archipelago_status_timestamp_seconds",
        "When the folders were read.",
        status.at.timestamp(),
    )
    yield _unlabelled_metric(
        "archipelago_running", "Whether aggregator run is running.", int(processes.running)
    )
    yield Metric(
        "archipelago_process_alive",
        "Whether a program of aggregator run is alive.",
        tuple(
            MetricSample(int(program.alive), {"process": program.name})
            for program in processes.programs
        ),
    )
    yield Metric(
        "archipelago_process_restarts_total",
        "How often a program was started again since aggregator run began.",
        tuple(
            MetricSample(program.num_restarts, {"process": program.name})
            for program in processes.programs
        ),
        kind="counter",
    )
    newest_version = max((release.version for release in status.releases), default=0)
    yield _unlabelled_metric(
        "archipelago_release_version", "The newest published version; 0 for none.", newest_version
    )
    yield _unlabelled_metric(
        "archipelago_disk_free_bytes", "Free on the disk.", status.disk_free_bytes
    )
    yield _unlabelled_metric(
        "archipelago_disk_size_bytes", "Size of the disk.", status.disk_total_bytes
    )
    yield Metric(
        "archipelago_expiry_timestamp_seconds",
        "When the plan, the certificate or signed metadata expire.",
        tuple(
            MetricSample(expiry.at.timestamp(), {"what": expiry.what}) for expiry in status.expiries
        ),
    )
    yield _unlabelled_metric(
        "archipelago_unreadable_files", "Files that could not be read.", len(status.problems)
    )


def _silo_metrics(status: FederationStatus) -> Iterator[Metric]:
    silos = status.silos
    # Zeros as well: an alert on a series that is absent never fires.
    yield Metric(
        "archipelago_silos",
        "Number of silos by their status.",
        tuple(
            MetricSample(sum(silo.standing == standing for silo in silos), {"standing": standing})
            for standing in STANDINGS
        ),
    )
    yield Metric(
        "archipelago_silos_waiting",
        "Number of silos whose work waits for a person at the silo or at the aggregator.",
        tuple(
            MetricSample(sum(silo.person == person for silo in silos), {"person": person})
            for person in get_args(Person)
            if person != "nobody"
        ),
    )
    yield _metric_by_silo(
        "archipelago_silo_last_seen_age_seconds",
        "Seconds since the silo answered; absent where it never did.",
        {
            silo.silo_id: (status.at - silo.last_seen).total_seconds()
            for silo in silos
            if silo.last_seen is not None
        },
    )
    yield _metric_by_silo(
        "archipelago_silo_training_progress_ratio",
        "Progress of the training as the silo reports it, from 0 to 1.",
        {silo.silo_id: silo.progress / 100 for silo in silos},
    )
    yield _metric_by_silo(
        "archipelago_silo_exit_code",
        "Exit code that the silo reports; 0 while its work goes on.",
        {silo.silo_id: silo.code for silo in silos},
    )
    arriving = {silo.silo_id: silo.arrival for silo in silos if silo.arrival is not None}
    yield _metric_by_silo(
        "archipelago_silo_arrived_bytes",
        "Bytes here of the submission on its way; absent where there is none.",
        {silo_id: arrival.bytes_here for silo_id, arrival in arriving.items()},
    )
    yield _metric_by_silo(
        "archipelago_silo_announced_bytes",
        "Bytes that the silo announced of that submission.",
        {silo_id: arrival.bytes_total for silo_id, arrival in arriving.items()},
    )
    yield Metric(
        "archipelago_silo_submissions",
        "Number of submissions by verdict; those that arrived wait for intake, those in quarantine for a person.",
        tuple(_submission_samples(silos)),
    )


def _submission_samples(silos: Iterable[SiloStatus]) -> Iterator[MetricSample]:
    for silo in silos:
        for verdict in get_args(SubmissionVerdict):
            num = sum(submission.verdict == verdict for submission in silo.submissions)
            yield MetricSample(num, {"silo": silo.silo_id, "verdict": verdict})


def _unlabelled_metric(name: str, meaning: str, value: float) -> Metric:
    return Metric(name, meaning, (MetricSample(value, {}),))


def _metric_by_silo(name: str, meaning: str, values: Mapping[str, float]) -> Metric:
    samples = [MetricSample(value, {"silo": silo_id}) for silo_id, value in values.items()]
    return Metric(name, meaning, tuple(samples))


def _escape(value: str) -> str:
    """Escape a label's value, in which neither a line break nor another control character is left."""
    text = escape_control(value, one_line=True)
    for sign, escaped in _ESCAPES:
        text = text.replace(sign, escaped)
    return text
