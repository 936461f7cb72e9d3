"""`silo check` on a real site: what it warns of where all is well, and each thing that goes wrong by its name."""

import base64
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ddm.io.settings import save_settings
from ddm.system.console import run_app
from ddm.system.findings import Findings
from ddm.system.processes import program
from ddm.training.config import TrainingSettings
from silo.check import reading
from silo.check.reading import SiteFactsReader
from silo.check.rules import SiteFacts, examine, examine_machine
from silo.check.torch_build import TorchBuild, is_compiled_for
from silo.cli import app
from silo.config import Site
from silo.courier.reach import try_connection
from silo.worker.state import Problem, State, save_state, state_path
from tests.support.case import case
from tests.support.federation import PlannedFederation, TinyFederation
from tests.support.submissions import SILO


@pytest.fixture
def tiny(sent_once: PlannedFederation, tmp_path: Path) -> TinyFederation:
    return sent_once.tiny.copy(tmp_path / "copy")


@pytest.fixture
def site(tiny: TinyFederation) -> Site:
    return tiny.sites[SILO]


def found_at(site: Site) -> Findings:
    """What is found, without the checks that find nothing."""
    return {
        check: findings
        for check, findings in examine(SiteFactsReader(site).facts()).items()
        if findings
    }


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


class Listener:
    """A server on this machine, a thread a connection."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(
                    target=self._guarded, args=(self._socket.accept()[0],), daemon=True
                ).start()

    def _guarded(self, link: socket.socket) -> None:
        with suppress(OSError), link:
            self.answer(link)

    def answer(self, link: socket.socket) -> None:
        raise NotImplementedError


class TlsServer(Listener):
    """Speaks TLS with a federation's certificate."""

    def __init__(self, tls: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(tls / "server.pem", tls / "server.key")
        super().__init__()

    def answer(self, link: socket.socket) -> None:
        with self._context.wrap_socket(link, server_side=True) as secured:
            if secured.recv(4096):
                date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
                secured.sendall(
                    f"HTTP/1.1 200 OK\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode()
                )


class PasswordProxy(Listener):
    """An HTTP proxy that opens tunnels for one user, and remembers what it was asked."""

    def __init__(self, user: str, password: str) -> None:
        self._expected = base64.b64encode(f"{user}:{password}".encode()).decode()
        self.asked: list[str] = []
        super().__init__()

    def answer(self, link: socket.socket) -> None:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += link.recv(4096)
        self.asked.append(request.decode().splitlines()[0])
        if self._expected not in request.decode():
            link.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        host, _, port = request.split()[1].decode().rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            link.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pour, args=(there, link), daemon=True)
            back.start()
            _pour(link, there)


def _pour(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def server(tiny: TinyFederation) -> Iterator[TlsServer]:
    listening = TlsServer(tiny.federation.path / "tls")
    yield listening
    listening.close()


def at_port(site: Site, port: int) -> Site:
    edit(site.path / "silo.toml", site.settings().address, f"127.0.0.1:{port}")
    return site


def test_healthy_site_is_told_of_one_user_for_both_halves_and_of_nothing_else(
    site: Site, server: TlsServer
) -> None:
    process = subprocess.run(
        [str(program("silo")), "check", str(at_port(site, server.port).path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    by_check = json.loads(process.stdout)
    findings = {check: of_check for check, of_check in by_check.items() if of_check}
    # one plan of epsilon 8 leaves less than 8 of the site's 10
    assert findings.pop("ledger")[0]["level"] == "warn"
    assert [finding["subject"] for finding in findings.pop("isolation")] == ["worker and courier"]
    if shutil.which("tesseract") is None:
        assert [finding["level"] for finding in findings.pop("burned-in text")] == ["warn"]
    assert not findings


def test_a_missing_tesseract_is_a_remark_that_says_what_to_install(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (None, "/usr/bin/tesseract"):
        monkeypatch.setattr(reading, "reader_path", lambda path=path: path)
        remarks = found_at(site).get("burned-in text", ())
        with case(path):
            assert [remark.level for remark in remarks] == (["warn"] if path is None else [])
            for remark in remarks:
                assert (
                    "by its shapes alone" in remark.got
                    and remark.remedy == "Install it: `apt-get install tesseract-ocr`."
                )


def test_what_fails_is_named_with_what_to_do_and_the_exit_code_says_so(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.key_path.chmod(0o644)
    with pytest.raises(SystemExit) as ended:
        run_app(app, ["check", str(site.path)])
    assert ended.value.code == 3
    printed = capsys.readouterr().out
    assert (
        "FAIL permissions" in printed
        and f"chmod go= {site.key_path}" in printed
        and "ok   packages" in printed
    )


def test_each_thing_that_goes_wrong_is_found_by_its_check(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "reader_path", lambda: "/usr/bin/tesseract")
    edit(site.path / "silo.toml", site.settings().root_digest, "0" * 64)
    edit(site.path / "silo.toml", "[training]\n", "[training]\nthreads = 1000\n")
    edit(site.path / "silo.toml", str(site.settings().data), str(tmp_path / "gone.npz"))
    (site.courier / "node.key").unlink()
    site.inbox.chmod(0o777)
    records = site.ledger_path.read_bytes()
    site.ledger_path.write_bytes(records.replace(b"debit", b"tibed", 1))
    problem = Problem(code=30, message="the plan asks for more")
    save_state(state_path(site.private), State(state="plan_refused", problem=problem))
    findings_by_check = found_at(site)
    levels = {
        check: {finding.level for finding in findings}
        for check, findings in findings_by_check.items()
    }
    expected = {check: {"fail"} for check in ("permissions", "keys", "ledger", "data")}
    assert levels == expected | {
        check: {"warn"} for check in ("device", "connection", "isolation", "work")
    }
    assert (
        findings_by_check["keys"][0].subject.endswith("courier/node.key")
        and findings_by_check["work"][0].got == "the plan asks for more (code 30)"
    )


def test_launcher_without_its_program_or_a_folder_that_it_can_write_is_found(
    site: Site, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    there = str(program("silo"))
    jobs.mkdir(mode=0o700)

    def launcher_findings(
        launcher: list[str], folder: Path | None = jobs
    ) -> list[tuple[str, str, str]]:
        engine = TrainingSettings(launcher=(*launcher, "{folder}"), jobs=folder)
        save_settings(
            site.settings().model_copy(update={"training": engine}), site.path / "silo.toml", "test"
        )
        return [
            (finding.level, finding.subject, finding.got)
            for finding in found_at(site).get("launcher", ())
        ]

    assert launcher_findings([there]) == []
    assert launcher_findings(["{python}", "-m", "x"], None) == []
    assert launcher_findings(["env", "A=b", there]) == []
    for words in (
        ["srun-that-is-not-there"],
        ["env", "A=b", "srun-that-is-not-there", "--nodes=2"],
    ):
        with case(words=words):
            gone = "srun-that-is-not-there, which is not found"
            assert launcher_findings(words) == [("fail", "training.launcher", gone)]
    ((level, subject, got),) = launcher_findings([there], tmp_path / "unmounted")
    assert (level, subject) == ("warn", str(tmp_path / "unmounted")) and "no such folder" in got
    for folder in (Path("/proc/1"), tmp_path / "file"):  # nobody writes to the first, root neither
        with case(folder=folder):
            (tmp_path / "file").touch()
            assert [
                (level, subject) for level, subject, _ in launcher_findings([there], folder)
            ] == [("fail", str(folder))]
    jobs.chmod(0o755)
    assert launcher_findings([there]) == [("warn", str(jobs), "mode 755")]
    jobs.chmod(0o777)
    ((level, subject, got),) = launcher_findings([there])
    assert (level, subject) == ("fail", str(jobs)) and "others may write" in got
    assert not list(jobs.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_jobs_that_another_user_made_or_can_replace_is_found(
    site: Site, tmp_path: Path
) -> None:
    made_by_stranger = tmp_path / "shared"
    jobs = made_by_stranger / "jobs"
    jobs.mkdir(parents=True, mode=0o700)
    training = TrainingSettings(launcher=(str(program("silo")), "{folder}"), jobs=jobs)
    changed = site.settings().model_copy(update={"training": training})
    save_settings(changed, site.path / "silo.toml", "test")
    assert "launcher" not in found_at(site)
    for folder in (made_by_stranger, jobs):
        with case(folder=folder):
            os.chown(folder, 54321, 54321)
            (finding,) = found_at(site)["launcher"]
            assert finding.level == "fail" and finding.subject == str(jobs)
            assert finding.got == f"{folder}: it belongs to user 54321"
            os.chown(folder, 0, 0)


def test_torchrun_as_a_launcher_is_found(site: Site) -> None:
    launcher = 'launcher = "torchrun -m ddm.training {folder}"'
    edit(site.path / "silo.toml", 'launcher = "local"', launcher)
    (finding,) = found_at(site)["configuration"]
    assert finding.level == "fail" and "torchrun runs the commands" in finding.got


def test_key_without_a_passphrase_and_a_gpu_that_is_not_there_fail(site: Site) -> None:
    key = Ed25519PrivateKey.generate()
    site.key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    facts = SiteFactsReader(site).facts()
    assert [finding.subject for finding in examine(facts)["keys"]] == ["private/silo.key"]
    assert facts.settings
    on_gpu = facts.settings.model_copy(
        update={"training": facts.settings.training.model_copy(update={"device": "cuda"})}
    )
    without_gpu = TorchBuild("2.13.0+cpu", cuda=None)
    on_one = TorchBuild("2.13.0", cuda="13.0", num_gpus=1)
    assert examine(replace(facts, settings=on_gpu, torch=without_gpu))["device"][0].level == "fail"
    assert not examine(replace(facts, settings=on_gpu, torch=on_one))["device"]


def test_machine_is_checked_without_a_site(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_app(app, ["check", "--json"])
    assert not left.value.code
    assert list(json.loads(capsys.readouterr().out)) == [
        "packages",
        "device",
        "memory",
        "burned-in text",
    ]


def test_gpu_that_this_torch_cannot_use_is_found_with_the_build_that_could() -> None:
    facts = SiteFacts(has_gpu=True, torch=TorchBuild("2.13.0+cpu", cuda=None))
    (finding,) = examine_machine(facts)["device"]
    assert finding.level == "warn" and "make setup TORCH=cuda" in finding.remedy
    facts = replace(facts, torch=TorchBuild("2.13.0", cuda="13.0"))
    (finding,) = examine_machine(facts)["device"]
    assert "driver" in finding.remedy
    facts = replace(
        facts, torch=TorchBuild("2.13.0", cuda="13.0", num_gpus=1, unsupported_gpus=("Tesla K80",))
    )
    (finding,) = examine_machine(facts)["device"]
    assert finding.level == "fail" and "Tesla K80" in finding.got
    assert not examine_machine(replace(facts, torch=TorchBuild("2.13.0", "13.0", num_gpus=1)))[
        "device"
    ]


def test_compiled_code_runs_on_later_minor_versions_and_translated_code_on_all_later_ones() -> None:
    for capability, architectures, is_fit in [
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((7, 0), ["compute_80"], False),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((9, 1), ["sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), ["gfx90a"], False),
    ]:
        with case((capability, architectures)):
            assert is_compiled_for(capability, architectures) is is_fit


def test_too_little_memory_or_disk_and_a_wrong_clock_are_found(site: Site) -> None:
    facts = SiteFactsReader(site).facts()
    assert facts.memory_bytes > 0 and facts.disk_bytes > 0
    poor = examine(replace(facts, memory_bytes=1, disk_bytes=1, ahead_s=900.0))
    assert poor["memory"] and poor["disk"] and "15 minutes ahead" in poor["clock"][0].got


def test_another_server_at_the_address_is_told_from_none(
    site: Site, server: TlsServer, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{server.port}"
    assert try_connection(address, site.courier / "ca.pem") is None
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    other = tmp_path / "other.pem"
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        [*made, "-subj", "/CN=other", "-keyout", str(tmp_path / "k"), "-out", str(other)],
        check=True,
        capture_output=True,
    )
    assert "does not verify" in (try_connection(address, other) or "")
    server.close()
    assert "refused" in (try_connection("127.0.0.1:1", other) or "")


def test_proxy_with_user_and_password_is_taken_and_its_password_never_shown(
    site: Site, server: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    proxy = PasswordProxy("ward", "s3cret")
    address = f"127.0.0.1:{server.port}"
    at_port(site, server.port)
    try:
        monkeypatch.setenv("https_proxy", f"http://ward:s3cret@127.0.0.1:{proxy.port}")
        assert try_connection(address, site.courier / "ca.pem") is None
        assert [line.split()[1] for line in proxy.asked] == [address]
        monkeypatch.setenv("https_proxy", f"http://ward:wrong@127.0.0.1:{proxy.port}")
        (finding,) = found_at(site)["connection"]
        assert (
            "407" in finding.got
            and f"127.0.0.1:{proxy.port}" in finding.expected
            and "wrong" not in repr(finding)
        )
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert "connection" not in found_at(site)
    finally:
        proxy.close()


def test_worker_in_a_container_that_hides_the_courier_is_isolated_and_misses_no_node_key(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(site.courier)
    monkeypatch.delenv("container", raising=False)
    assert "keys" in found_at(site), "control: elsewhere the folder is missed"
    monkeypatch.setenv("container", "podman")
    findings = found_at(site)
    assert site.isolation == "containers" and not {"isolation", "keys"} & set(findings)


def test_ledger_is_shown_and_verified(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["ledger", "show", str(site.path), "--json"],
        ["ledger", "verify", str(site.path)],
    ):
        with pytest.raises(SystemExit) as ended:
            run_app(app, arguments)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        if "--json" in arguments:
            shown = json.loads(printed)
    (line,) = shown["lines"]
    assert line["drawn"] == line["mechanisms"] == ["counts", "sketch"]
    assert 0 < line["epsilon"] <= shown["spent"]
    assert 0 < shown["left"] < 10.0 - shown["spent"]
    assert shown["head"] in printed and "3 records, unbroken" in printed
    with site.ledger_path.open("ab") as handle:
        handle.write(b"{}\n")
    with pytest.raises(SystemExit) as ended:
        run_app(app, ["ledger", "verify", str(site.path)])
    assert ended.value.code not in (0, 1)
