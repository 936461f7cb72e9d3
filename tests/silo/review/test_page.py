"""What a person sees before a submission leaves: all of it, as text and in a real browser; and who is kept out."""

import http.client
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from ddm.errors import ApprovalError, DigestError, SetupError
from ddm.pages.render import render
from ddm.privacy.noise import discrete_laplace
from ddm.protocol.base import sha256_hex
from ddm.protocol.submission import Submission, submission_path
from ddm.statistics.histograms import discrete_laplace_std
from ddm.statistics.sketch import sketch_noise_level
from ddm.system.processes import program
from silo.config import Site
from silo.decisions import DecisionLog
from silo.review.contents import as_text, open_verified, verified_blocks
from silo.review.facts import read_review_facts
from silo.review.samples import MAX_SAMPLES, ExpertSheets
from silo.review.text import review_text
from silo.worker.approval import approval_path, approve
from silo.worker.state import load_state, save_state, state_path
from silo.worker.withdrawal import withdraw_from_plan
from tests.aggregator.monitoring.test_live import CONTRAST
from tests.support.browser import browser, one_browser, overflow, show_as
from tests.support.case import case
from tests.support.commands import run_command
from tests.support.errors import has_subject
from tests.support.federation import POLICY, PlannedFederation, TinyFederation, write_policy
from tests.support.seeded import SeededNoise
from tests.support.waiting import LIMIT_S, wait_until

__all__ = ["browser", "one_browser"]

SILO = "north"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def waiting_once(
    sent_once: PlannedFederation, tmp_path_factory: pytest.TempPathFactory
) -> TinyFederation:
    """A site whose first submission was refused, and whose second one waits for a person."""
    tiny = sent_once.tiny.copy(tmp_path_factory.mktemp("waiting") / "copy")
    site = tiny.sites[SILO]
    state = load_state(state_path(site.private))
    waiver = {"role": HOSTILE, "reason": "made-up images", "plan_digest": state.plan_digest}
    waiver |= {"verdict": "inconclusive", "expires_at": datetime(2099, 12, 31, tzinfo=UTC)}
    write_policy(
        site,
        POLICY | {"approval": {"kind": "person"}, "audit": {"required": True, "waiver": waiver}},
    )
    path = state_path(site.private)
    save_state(path, load_state(path).model_copy(update={"state": "refused"}))
    tiny.work(SILO, until="awaiting_approval")
    return tiny


@pytest.fixture
def tiny(waiting_once: TinyFederation, tmp_path: Path) -> TinyFederation:
    return waiting_once.copy(tmp_path / "copy")


@pytest.fixture
def site(tiny: TinyFederation) -> Site:
    return tiny.sites[SILO]


def test_every_file_that_leaves_was_shown_before_byte_for_byte(
    tiny: TinyFederation, site: Site
) -> None:
    facts = read_review_facts(site)
    shown = {file.path: file.local.read_bytes() for file in facts.files}
    assert {file.path: file.digest for file in facts.files} == {
        name: sha256_hex(data) for name, data in shown.items()
    }
    approve(site, facts.draft.digest)
    tiny.work(SILO)
    sent = site.outbox / facts.draft.plan_id / "2"
    left = {
        path.relative_to(sent).as_posix(): path.read_bytes()
        for path in sent.rglob("*")
        if path.is_file()
    }
    assert left.keys() - shown.keys() == {f"metadata/{facts.draft.plan_id}.{SILO}.json"}
    document = submission_path(SILO)
    assert {name: left[name] for name in shown if name != document} == {
        name: data for name, data in shown.items() if name != document
    }
    final = Submission.parse(left[document], subject="sent")
    assert (
        final.approval is not None
        and final.model_copy(update={"approval": None}).encode() == shown[document]
    )


def test_rehearsal_is_said_on_the_page_and_in_the_text_and_another_plan_is_called_none(
    site: Site,
) -> None:
    facts = read_review_facts(site)
    assert facts.plan.rehearsal
    real = facts.plan.model_copy(update={"rehearsal": False})
    for shown_facts, said in (
        (facts, True),
        (replace(facts, accepted=replace(facts.accepted, plan=real)), False),
    ):
        with case(said=said):
            page = render(
                "silo",
                "approve.html.jinja",
                facts=shown_facts,
                draft=shown_facts.draft,
                findings=(),
            )
            text = review_text(site, shown_facts)
            assert ('id="rehearsal"' in page) == ("experts draw noise" in page) == said
            assert ("REHEARSAL" in text) == ("experts draw noise" in text) == said


def test_page_draws_the_learning_curve_of_each_expert_and_says_that_it_stays(site: Site) -> None:
    facts = read_review_facts(site)
    assert [curve.expert_id for curve in facts.curves] == [
        expert.expert_id for expert in facts.draft.experts
    ]
    page = render("silo", "approve.html.jinja", facts=facts, draft=facts.draft, findings=())
    assert page.count('<svg class="curve"') == len(facts.curves)
    last = facts.curves[0].metrics[-1]
    assert f"{last.loss:.4g} at step {last.step}" in page and "None of it leaves." in page
    without = render(
        "silo",
        "approve.html.jinja",
        facts=replace(facts, curves=()),
        draft=facts.draft,
        findings=(),
    )
    assert "Learning curves" not in without


def leaves(value: object) -> Iterator[float]:
    """Every number in a document."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_every_number_of_the_document_is_shown_beside_the_one_before(site: Site) -> None:
    facts = read_review_facts(site)
    now = {value.name: value for value in facts.numbers}
    assert (now["submission"].before, now["submission"].now, now["submission"].changed) == (
        "1",
        "2",
        True,
    )
    assert not now["plan"].changed and now["number of images"].now == "40"
    shown = {word for value in facts.numbers for word in re.split("[ ,]+", value.now)} | {
        str(file.bytes) for file in facts.files
    }
    document = json.loads(facts.draft.encode())
    document["ledger"]["chain"] = []  # shown by its number and its end, read in full in the file
    missing = [
        leaf for leaf in leaves(document) if f"{leaf:.6g}" not in shown and str(leaf) not in shown
    ]
    assert missing == []
    assert 0 < facts.budget.left < 10 - facts.budget.spent
    assert facts.audit is not None and "held-out" in facts.audit.reason


def test_noise_levels_are_those_of_the_noise(site: Site) -> None:
    for epsilon in (0.2, 1.0, 5.0):
        drawn = discrete_laplace(20_000, epsilon, SeededNoise(0))
        assert discrete_laplace_std(epsilon) == pytest.approx(float(np.std(drawn)), rel=0.05)
    sketch = next(noise for noise in read_review_facts(site).noises if noise.kind == "sketch")
    # (sigma_r / alpha_r) / C of the plan's own files, computed from t_release instead of mu.
    facts = read_review_facts(site)
    t_release = sketch_noise_level(facts.plan, facts.accepted.files().sketch)
    assert t_release is not None
    direct = t_release / (1 - t_release) / facts.accepted.files().sketch.scale
    assert float(sketch.level.split()[-1]) == pytest.approx(direct, rel=0.01)


def test_file_that_is_not_the_drafts_is_refused_before_anything_is_shown(site: Site) -> None:
    path = site.private / "review" / "counts.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(ApprovalError, check=has_subject("counts")):
        read_review_facts(site)
    assert run_command("silo", "review", site.path).code == ApprovalError.exit_code


def test_contents_are_shown_as_numbers_and_text(site: Site) -> None:
    texts = {file.path: as_text(file.local, file.digest) for file in read_review_facts(site).files}
    assert '"num_units": 40' in texts[submission_path(SILO)]
    counts = texts["counts.safetensors"]
    assert (
        counts.startswith("1 tensors, 4 values")
        and "counts: I64 [4], least" in counts
        and "[" in counts.splitlines()[3]
    )


def test_samples_are_drawn_without_a_connection(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    sheets = ExpertSheets(site, read_review_facts(site))
    sheets._draw()
    (sheet,) = sheets.sheets
    assert sheets.is_done and not sheet.problem and len(set(sheet.pictures)) == MAX_SAMPLES
    assert all(picture.startswith("data:image/png;base64,") for picture in sheet.pictures)


def test_broken_expert_shows_why_there_are_no_samples(site: Site) -> None:
    facts = read_review_facts(site)
    next(file.local for file in facts.files if "expert" in file.path).unlink()
    sheets = ExpertSheets(site, facts)
    sheets._draw()
    assert sheets.is_done and sheets.sheets[0].problem.startswith("not drawn")


def test_text_is_printed_where_nobody_sits_at_a_terminal(site: Site) -> None:
    for words in ((), ("--text",)):
        result = run_command("silo", "review", site.path, *words)
        digest = read_review_facts(site).draft.digest
        assert result.code == 0 and f"--digest {digest}" in result.out and "http" not in result.out
        assert "Since the submission before" in result.out and "standard deviation" in result.out
    assert (
        run_command("silo", "review", site.path, "--images", "--text").code == SetupError.exit_code
    )


@dataclass(frozen=True)
class ReviewPage:
    """The page as it is served."""

    process: "subprocess.Popen[str]"
    url: str

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    @property
    def origin(self) -> str:
        return self.url.removesuffix(self.path)

    def ask(
        self, method: str, name: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=LIMIT_S)
        try:
            connection.request(method, name, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return (
                answer.status,
                {key.lower(): value for key, value in answer.getheaders()},
                answer.read(),
            )
        finally:
            connection.close()

    def decide(self, what: str, digest: str, **headers: str) -> tuple[int, str]:
        own = {"Content-Type": "application/json", "Origin": self.origin} | headers
        status, _, answer = self.ask("POST", self.path + what, {"submission_digest": digest}, **own)
        return status, answer.decode()


@contextmanager
def served(site: Site) -> Iterator[ReviewPage]:
    words = [str(program("silo")), "review", str(site.path), "--page"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()  # type: ignore[union-attr]
            assert "http://127.0.0.1:" in line, line + process.stderr.read()  # type: ignore[union-attr]
            yield ReviewPage(process, line.split()[-1])
        finally:
            process.kill()


def test_only_the_page_itself_decides_and_only_about_the_draft_that_it_shows(
    tiny: TinyFederation, site: Site
) -> None:
    digest = read_review_facts(site).draft.digest
    with served(site) as page:
        for path in ("/", "/state", "/x/file/1", page.path[:-3] + "/"):
            status, _, answer = page.ask("GET", path)
            assert status == 404 and SILO.encode() not in answer, path
        assert page.ask("GET", page.path, Host="evil.example")[0] == 421
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Content-Type": "text/plain"},
        ):
            assert page.decide("approve", digest, **headers)[0] == 403, headers
        for wrong in ("0" * 64, "x", ""):
            assert page.decide("approve", wrong)[0] == 400, wrong
        assert page.ask("GET", page.path + "approve")[0] == 405
        assert page.ask("GET", page.path + "file/99")[0] == 404
        for name in ("", "state", "file/1", "view/2", "approve.js", "ask.js"):
            status, headers, _ = page.ask("GET", page.path + name)
            assert status == 200 and headers["cache-control"] == "no-store", name
            assert headers["content-security-policy"].startswith(
                "default-src 'none'; script-src 'self'"
            )
        for number, file in enumerate(read_review_facts(site).files):
            assert page.ask("GET", f"{page.path}file/{number}")[2] == file.local.read_bytes()
        assert not approval_path(site).exists()
        withdraw_from_plan(site, tiny.key(SILO))
        status, words = page.decide("approve", digest)
        assert status == 503 and "state withdrawn" in words


def exchange(path: Path) -> None:
    """Put a file with one other bit in the place of a file, which may be a link to the one that will be sent."""
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_file_that_is_exchanged_after_the_page_has_opened_is_not_shown(site: Site) -> None:
    facts = read_review_facts(site)
    exchanged = {0: facts.files[0], 1: facts.files[1], 2: facts.files[2]}
    assert {file.local.suffix for file in exchanged.values()} == {".json", ".safetensors"}
    with served(site) as page:
        for number, file in exchanged.items():
            before = file.local.read_bytes()
            exchange(file.local)
            for name in ("view", "file"):
                status, _, answer = page.ask("GET", f"{page.path}{name}/{number}")
                assert status == 409, (name, file.path)
                assert file.digest[:16].encode() in answer and b"private/ from backup" in answer
            file.local.write_bytes(before)
            for name in ("view", "file"):
                assert page.ask("GET", f"{page.path}{name}/{number}")[0] == 200


def test_tensors_too_large_to_be_shown_are_hashed_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.review.contents._MAX_OPENED_BYTES", 0)
    file = read_review_facts(site).files[1]
    assert "Too large to be opened here" in as_text(file.local, file.digest)
    exchange(file.local)
    with pytest.raises(DigestError):
        as_text(file.local, file.digest)


def test_download_of_a_file_that_changes_meanwhile_lacks_its_end(tmp_path: Path) -> None:
    path = tmp_path / "expert.safetensors"
    data = bytes(3 << 20)
    path.write_bytes(data)
    assert (
        b"".join(verified_blocks(open_verified(path, sha256_hex(data)), sha256_hex(data))) == data
    )
    blocks = verified_blocks(open_verified(path, sha256_hex(data)), sha256_hex(data))
    received = [next(blocks)]
    with path.open("r+b") as handle:
        handle.seek(len(data) - 1)
        handle.write(b"1")
    with pytest.raises(DigestError, match=sha256_hex(data)):
        received += blocks
    assert sum(len(block) for block in received) < len(data)


def test_person_reads_looks_and_approves_in_a_browser(site: Site, browser: Chrome) -> None:
    facts = read_review_facts(site)
    with served(site) as page:
        browser.get(page.url)
        wait_until(
            lambda: len(browser.find_elements(By.CSS_SELECTOR, ".sheet img")) == MAX_SAMPLES,
            "samples",
        )
        drawn = "return [...document.querySelectorAll('.sheet img')].every(i => i.naturalWidth > 0)"
        wait_until(lambda: browser.execute_script(drawn), "pictures that are drawn")
        text = browser.find_element(By.TAG_NAME, "body").text
        for words in (
            facts.draft.digest,
            HOSTILE,
            *(file.digest for file in facts.files),
            *(noise.level for noise in facts.noises),
        ):
            assert words in text
        changed = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "tr.changed")]
        assert any(row.startswith("submission 2 1") for row in changed)
        for device, dark in (("phone", False), ("desktop", True), ("desktop", False)):
            show_as(browser, device, dark=dark)
            assert overflow(browser) == 0
            assert browser.execute_script(CONTRAST) >= 4.5, (device, dark)
        browser.find_element(By.CSS_SELECTOR, ".files a").click()
        assert '"num_units": 40' in browser.find_element(By.TAG_NAME, "pre").text
        browser.back()
        wait_until(
            lambda: browser.find_element(By.ID, "approve").is_enabled(),
            "a page that knows the state",
        )
        browser.find_element(By.ID, "approve").click()
        browser.find_element(By.ID, "no").click()
        assert not approval_path(site).exists()
        browser.find_element(By.ID, "approve").click()
        browser.find_element(By.ID, "yes").click()
        wait_until(
            lambda: browser.find_element(By.ID, "state").text == "approved",
            "the approval on the page",
        )
        assert not browser.find_element(By.ID, "approve").is_enabled()
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        browser.find_element(By.ID, "done").click()
        assert page.process.wait(timeout=LIMIT_S) == 0
    assert facts.draft.digest in approval_path(site).read_text()
    assert DecisionLog(site).entries[-1].record.decision.kind == "approved"
