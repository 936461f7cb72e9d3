"""What `aggregator run` logs: intake's lines once each, whichever form they come in, and what silos report."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from aggregator.config import Federation
from aggregator.runtime.flower import FlowerRuntime
from aggregator.runtime.running import IntakeNews, Newcomers, SiloNews, _intake_logging
from aggregator.transfer.settings import RunSettings
from ddm.errors import MissingFileError
from ddm.protocol.plan import Plan
from ddm.system.logs import JSON_VARIABLE, VERBOSE_VARIABLE, JsonFormatter, LogOptions
from ddm.system.processes import free_port
from tests.conftest import PublishedRelease
from tests.support.documents import plan_document, to_bytes
from tests.support.errors import has_subject
from tests.support.federation_keys import KeyedFederation


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    """Records of every level are kept."""
    caplog.set_level(logging.DEBUG, logger="aggregator")


def test_lines_of_intake_are_logged_once_and_records_under_their_own_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "intake.log"
    log.write_text("from before\n")
    news = IntakeNews(log)
    record = logging.getLogger("aggregator.runtime.intake_process").makeRecord(
        "aggregator.runtime.intake_process",
        logging.WARNING,
        "",
        0,
        "[%s] REFUSED",
        ("north",),
        None,
    )
    with log.open("a") as lines:
        lines.write(
            "[north] submission 1 accepted\n" + JsonFormatter().format(record) + "\nhalf a li"
        )
    for _ in range(2):
        news.log_new()
    assert caplog.record_tuples == [
        ("aggregator.runtime.running", logging.INFO, "[north] submission 1 accepted"),
        ("aggregator.runtime.intake_process", logging.WARNING, "[north] REFUSED"),
    ]
    with log.open("a") as lines:
        lines.write("ne\n")
    news.log_new()
    assert caplog.messages[-1] == "half a line"


def test_line_longer_than_a_block_does_not_stop_the_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "intake.log"
    log.touch()
    news = IntakeNews(log)
    log.write_text("x" * 200_000 + "\nthe line after it\n")
    for _ in range(5):
        news.log_new()
    assert caplog.messages[-1] == "the line after it"


@pytest.mark.parametrize(
    ("verbose", "as_json", "expected"),
    [
        ("0", "0", LogOptions()),
        ("1", "0", LogOptions(True, True)),
        ("0", "1", LogOptions(False, True)),
    ],
)
def test_intake_logs_records_where_a_line_must_keep_its_level(
    monkeypatch: pytest.MonkeyPatch, verbose: str, as_json: str, expected: LogOptions
) -> None:
    monkeypatch.setenv(VERBOSE_VARIABLE, verbose)
    monkeypatch.setenv(JSON_VARIABLE, as_json)
    assert _intake_logging() == expected


def test_state_of_a_silo_is_logged_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path)
    plan = Plan.parse(to_bytes(plan_document()), subject="plan")
    news = SiloNews(federation, plan)
    silo_id = plan.silos[0]
    status = federation.incoming / plan.plan_id / silo_id / "status.json"
    status.parent.mkdir(parents=True)
    for state in (
        {"state": "training", "progress": 5},
        {"state": "training", "progress": 5},
        {"state": "sending"},
        {"state": "training", "progress": 100, "code": 33},
    ):
        status.write_text(json.dumps(state))
        news.log_new()
    assert caplog.messages == [
        f"[{silo_id}] training 5%",
        f"[{silo_id}] sending",
        f"[{silo_id}] training 100%, needs a person there (code 33)",
    ]


class Registrar:
    """Stands in for Flower's programs: keeps what is registered."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}

    def register(self, nodes: Mapping[str, str]) -> None:
        self.nodes.update(nodes)


def test_silo_enrolled_while_the_aggregator_runs_may_connect_although_no_plan_names_it(
    published: PublishedRelease,
) -> None:
    tiny = published.tiny
    plan, _ = tiny.federation.current_plan()
    registrar = Registrar()
    newcomers = Newcomers(tiny.federation, plan, registrar)
    newcomers.let_in()
    assert registrar.nodes == {}
    tiny.join("west", 20, index=2)
    newcomers.let_in()
    assert set(registrar.nodes) == {"west"}
    assert registrar.nodes["west"].startswith("ecdsa-")


@pytest.mark.parametrize("name", ["ca.pem", "server.pem", "server.key"])
def test_run_without_a_file_of_tls_names_it_before_any_program_starts(
    tmp_path: Path, name: str
) -> None:
    keyed = KeyedFederation(tmp_path)
    keyed.found()
    tls = keyed.federation.path / "tls"
    (tls / name).unlink()
    runtime = FlowerRuntime(
        keyed.federation.path,
        RunSettings(plan_id="digits-00000001", nodes={}, shard_bytes=65536, max_submission_bytes=1),
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
    )
    with pytest.raises(MissingFileError, check=has_subject(str(tls / name))) as refused:
        runtime.start()
    assert refused.value.remedy == "Restore tls/ from the backup of this federation."
    assert not (keyed.federation.path / "flower").exists()
