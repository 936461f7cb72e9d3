"""A person's review of flagged images: the page in a real browser, the same by names of files, and who is kept out."""

import csv
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from ddm.errors import MissingFileError, SetupError
from ddm.images.picture import DecodeLimits, Picture
from ddm.system.processes import program
from silo.images.decisions import Decision, Decisions
from silo.images.drawing import drawn
from silo.images.memory import ScanMemory
from silo.images.review import WAITING, Review
from silo.images.server import PAGE_SIZE
from tests.support.browser import browser, one_browser, overflow, show_as
from tests.support.case import case
from tests.support.cohorts import scan_at
from tests.support.commands import run_command
from tests.support.dicom_files import tags_of, waves, write
from tests.support.processes import is_running, running_children
from tests.support.waiting import LIMIT_S, wait_until

__all__ = ["browser", "one_browser"]

LIMITS = DecodeLimits(memory_bytes=2 << 30)
HOSTILE = "<img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class ImageSite:
    """Images of a made site, and the private folder of their scans."""

    data: Path
    private: Path

    @property
    def options(self) -> tuple[object, ...]:
        return ("--data", self.data, "--private", self.private)

    def scan(self) -> dict[str, int]:
        return dict(scan_at(self.data, self.private, LIMITS).reasons)


def scanned(folder: Path, num: int = 5) -> ImageSite:
    """Some ultrasound images, the last one the copy of the first, and a clip of three frames; all were scanned."""
    made = ImageSite(folder / "data", folder / "private")
    (made.data / "deep").mkdir(parents=True)
    for number in range(num - 1):
        write(tags_of(waves((48, 40 + number)), Modality="US"), made.data / f"{number:02d}.dcm")
    write(tags_of(waves((48, 40)), Modality="US"), made.data / "copy.dcm")
    write(tags_of(waves((3, 30, 36)), Modality="US"), made.data / "deep/clip.dcm")
    made.scan()
    return made


@contextmanager
def reviewed(made: ImageSite) -> Iterator[Review]:
    with Decisions.opened(made.private) as decisions:
        with ScanMemory.opened(made.private, "") as memory:
            review = Review.of(memory, decisions)
        yield review


def test_decisions_go_with_equal_pixels_and_whole_files_and_are_undone_one_by_one(
    tmp_path: Path,
) -> None:
    made = scanned(tmp_path)
    with reviewed(made) as review:
        names = [Path(picture.path).name for picture in review.pictures]
        assert names == [
            "00.dcm",
            "01.dcm",
            "02.dcm",
            "03.dcm",
            "copy.dcm",
            "clip.dcm",
            "clip.dcm",
            "clip.dcm",
        ]
        assert review.with_others(6) == [5, 6, 7] and review.below(made.data / "deep") == [5, 6, 7]
        assert review.flags(WAITING) == {"ultrasound": 8}
        review.decide([0], Decision.LEAVE_OUT)
        assert [review.state(number) for number in (0, 4, 1)] == ["leave out", "leave out", WAITING]
        review.decide(review.with_others(5), Decision.CLEAR)
        review.decide([4], Decision.CLEAR)
        assert review.counts == {WAITING: 3, "clear": 5, "leave out": 0}
        review.undo()
        assert review.counts == {WAITING: 3, "clear": 3, "leave out": 2}
        review.undo()
        review.undo()
        review.undo()
        assert review.counts == {WAITING: 8, "clear": 0, "leave out": 0} and not review.can_undo
        review.decide([1], Decision.CLEAR)
    with reviewed(made) as review:
        assert review.counts[Decision.CLEAR] == 1
    assert made.scan() == {"ultrasound": 7}


def test_names_on_the_command_line_hold_in_any_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scanned(tmp_path)
    review = ("silo", "review", "--images", "--private", made.private)
    monkeypatch.chdir(made.data.parent)
    run_command("silo", "scan", "--private", made.private, "--data", made.data.name)
    monkeypatch.chdir(made.data)
    listed = run_command(*review, "--data", ".", "--list")
    assert str(made.data / "copy.dcm") in listed.out
    finished = run_command(
        *review, "--data", ".", "--clear", "deep", "--leave-out", made.data / "copy.dcm"
    )
    assert "3 images wait, 3 are cleared, 2 left out" in finished.out


def test_command_lists_what_waits_and_decides_by_names(tmp_path: Path) -> None:
    made = scanned(tmp_path)
    finished = run_command("silo", "review", "--images", *made.options, "--list")
    assert (
        finished.code == 0
        and str(made.data / "copy.dcm") in finished.out
        and "8 images wait, 0 are cleared" in finished.out
    )
    finished = run_command(
        *("silo", "review", "--images", *made.options, "--clear", made.data / "deep"),
        *("--leave-out", made.data / "copy.dcm"),
    )
    assert "3 images wait, 3 are cleared, 2 left out" in finished.out
    assert made.scan() == {"ultrasound": 3, "left out by a person": 2}
    gone = run_command(
        "silo", "review", "--images", *made.options, "--clear", made.data / "copy.dcm"
    )
    assert gone.code == MissingFileError.exit_code and "images that wait for a person" in gone.err
    again = run_command(
        "silo", "review", "--images", *made.options, "--leave-out", made.data / "deep"
    )
    assert "3 images wait, 0 are cleared, 5 left out" in again.out
    for words in (["--images"], ["--list"], []):
        assert run_command("silo", "review", *words).code == SetupError.exit_code
    other = run_command(
        "silo", "review", "--images", "--data", tmp_path, "--private", tmp_path / "none"
    )
    assert (
        other.code == MissingFileError.exit_code
        and "silo scan" in other.err
        and not (tmp_path / "none").exists()
    )


PLAN = """
[data]
shape = [1, 16, 16]
range = [-1.0, 1.0]
[transform]
channels = "grey"
"""


def with_sheet(folder: Path) -> ImageSite:
    """Four accepted images, one of them in two copies, one ultrasound image, and a sheet of the accepted ones."""
    made = ImageSite(folder / "data", folder / "private")
    (made.data / "deep").mkdir(parents=True)
    for number in range(3):
        Image.fromarray(waves((40, 40 + number), high=255, dtype=np.uint8)).save(
            made.data / f"{number}.png"
        )
    Image.fromarray(waves((40, 50), high=255, dtype=np.uint8)).save(made.data / "deep/3.png")
    Image.fromarray(waves((40, 41), high=255, dtype=np.uint8)).save(made.data / "deep/copy.png")
    write(tags_of(waves((48, 40)), Modality="US"), made.data / "us.dcm")
    (folder / "plan.toml").write_text(PLAN)
    sheet = ("--preview", folder / "sheet.png", "--plan", folder / "plan.toml")
    finished = run_command("silo", "scan", *made.options, *sheet)
    assert finished.code == 0 and "--leave-out NUMBER" in finished.out
    return made


def test_accepted_images_are_left_out_by_number_or_name_and_taken_back(tmp_path: Path) -> None:
    made = with_sheet(tmp_path)
    numbers = {
        Path(row["path"]).name: row["number"]
        for row in csv.DictReader((tmp_path / "sheet.png.csv").read_text().splitlines())
    }
    assert sorted(numbers) == ["0.png", "1.png", "2.png", "3.png"]
    review = ("silo", "review", "--images", *made.options)
    finished = run_command(*review, "--leave-out", numbers["1.png"])
    assert (
        finished.code == 0 and "1 images wait, 0 are cleared, 2 left out" in finished.out
    )  # and its copy
    assert made.scan() == {"ultrasound": 1, "left out by a person": 2}
    finished = run_command(*review, "--leave-out", made.data / "deep")
    assert "1 images wait, 0 are cleared, 3 left out" in finished.out
    assert made.scan() == {"ultrasound": 1, "left out by a person": 3}
    with reviewed(made) as pictures:
        left_out = pictures.listed(Decision.LEAVE_OUT)
        assert [Path(pictures.pictures[number].path).name for number in left_out] == [
            "1.png",
            "3.png",
            "copy.png",
        ]
        pictures.decide(left_out[:1], None)
        assert pictures.counts == {WAITING: 1, "clear": 0, "leave out": 1}
        pictures.decide(left_out[1:2], Decision.CLEAR)  # without a flag: it is accepted again
        assert pictures.counts == {WAITING: 1, "clear": 0, "leave out": 0}
        pictures.undo()
        pictures.undo()
        assert pictures.counts == {WAITING: 1, "clear": 0, "leave out": 3}
        pictures.decide(left_out, None)
    assert made.scan() == {"ultrasound": 1}


def test_a_wrong_name_or_number_decides_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    made = with_sheet(tmp_path)
    review = ("silo", "review", "--images", *made.options)
    for name in ("0", "5", "99999999999999999999", tmp_path / "none.png", made.data / "none"):
        with case(name=name):
            finished = run_command(*review, "--leave-out", made.data / "0.png", "--leave-out", name)
            assert finished.code == MissingFileError.exit_code and finished.err
    finished = run_command(*review, "--clear", "1")
    assert finished.code == MissingFileError.exit_code  # nothing is the matter with it
    Image.fromarray(waves((41, 44), high=255, dtype=np.uint8)).save(made.data / "0.png")
    assert made.scan() == {"ultrasound": 1}
    finished = run_command(*review, "--leave-out", "1")
    assert (
        finished.code == MissingFileError.exit_code
        and "has changed or no longer exists" in finished.err
    )
    assert made.scan() == {"ultrasound": 1}
    (made.private / "preview.csv").write_text("number,path\n1,x\n")
    assert run_command(*review, "--leave-out", "1").code == SetupError.exit_code
    (made.private / "preview.csv").unlink()
    finished = run_command(*review, "--leave-out", "1")
    assert finished.code == MissingFileError.exit_code and "--preview FILE.png" in finished.err


def test_the_page_leaves_out_pictures_of_the_last_sheet_and_accepts_them_again(
    tmp_path: Path, browser: Chrome
) -> None:
    made = with_sheet(tmp_path)
    with served(made) as page:
        browser.get(page.url)
        until_left(browser, 1, 1)
        show = Select(browser.find_element(By.ID, "show"))
        show.select_by_value("accepted")
        wait_until(
            lambda: shown(browser) == ["0.png", "1.png", "2.png", "3.png"],
            "the pictures of the sheet",
        )
        option = browser.find_element(By.ID, "show-accepted").text
        assert option == "accepted, of the last preview sheet (4)"
        visible = [
            button.text
            for button in browser.find_elements(By.CSS_SELECTOR, ".tile .tools button")
            if button.text
        ]
        assert set(visible) == {"Leave out"}
        browser.find_element(By.CSS_SELECTOR, ".tile .bad").click()
        wait_until(lambda: shown(browser) == ["1.png", "2.png", "3.png"], "a picture left out")
        show.select_by_value("leave out")
        wait_until(lambda: shown(browser) == ["0.png"], "what is left out")
        visible = [
            button.text
            for button in browser.find_elements(By.CSS_SELECTOR, ".tile .tools button")
            if button.text
        ]
        assert visible == ["Accept again"]
        browser.find_element(By.ID, "undo").click()
        wait_until(lambda: shown(browser) == [], "undone")
        show.select_by_value("accepted")
        wait_until(lambda: len(shown(browser)) == 4, "the pictures of the sheet")
        browser.get("about:blank")  # the browser is shared: the page asks no server that is gone
    assert made.scan() == {"ultrasound": 1}


@dataclass(frozen=True)
class ImageReviewPage:
    """The page as it is served."""

    process: "subprocess.Popen[str]"
    url: str

    def ask(
        self, method: str, path: str, body: str = "", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=LIMIT_S)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            if body:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body.encode())
            answer = connection.getresponse()
            return (
                answer.status,
                {name.lower(): value for name, value in answer.getheaders()},
                answer.read(),
            )
        finally:
            connection.close()

    @property
    def path(self) -> str:
        return urlsplit(self.url).path

    @property
    def origin(self) -> str:
        return self.url.removesuffix(self.path)


@contextmanager
def served(made: ImageSite) -> Iterator[ImageReviewPage]:
    words = [str(word) for word in (program("silo"), "review", "--images", *made.options)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            if "http://127.0.0.1:" not in line:
                process.kill()  # else reading what it has to say waits for its end
                pytest.fail(line + process.stderr.read())
            yield ImageReviewPage(process, line.split()[-1])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def one_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageReviewPage]:
    with served(scanned(tmp_path_factory.mktemp("review"))) as page:
        yield page


def test_nobody_without_the_secret_address_sees_or_changes_anything(
    one_page: ImageReviewPage,
) -> None:
    for path in (
        "/",
        "/state",
        "/x/state",
        f"{one_page.path[:-3]}/state",
        f"{one_page.path}../etc/passwd",
    ):
        status, _, answer = one_page.ask("GET", path)
        assert status == 404 and b"dcm" not in answer, path
    state = f"{one_page.path}state"
    assert b"clip.dcm" in one_page.ask("GET", state)[2]
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "192.0.2.1",
        "localhost.evil.example",
        "",
    ):
        status, _, answer = one_page.ask("GET", state, Host=host)
        assert status in (400, 421) and b"dcm" not in answer, host
    decision = json.dumps({"numbers": [0], "decision": "clear"})
    kind = "application/json"
    for headers in (
        {"Content_Type": kind},
        {"Content_Type": kind, "Origin": "http://evil.example"},
        {"Content_Type": kind, "Origin": "null"},
        {"Content_Type": "text/plain", "Origin": one_page.origin},
    ):
        assert one_page.ask("POST", f"{one_page.path}decide", decision, **headers)[0] == 403, (
            headers
        )
    assert one_page.ask("GET", f"{one_page.path}decide")[0] == 405
    for body in (
        "{}",
        "x",
        '{"numbers": [99], "decision": "clear"}',
        '{"numbers": [0], "decision": "sell"}',
        "[" * 9999,
    ):
        headers = {"Content_Type": kind, "Origin": one_page.origin}
        assert one_page.ask("POST", f"{one_page.path}decide", body, **headers)[0] == 400, body
    assert json.loads(one_page.ask("GET", state)[2])["counts"][WAITING] == 8


def test_every_answer_keeps_other_pages_and_caches_out(one_page: ImageReviewPage) -> None:
    wait_until(
        lambda: one_page.ask("GET", f"{one_page.path}picture/0")[0] == 200, "a drawn picture"
    )
    for path in ("", "state", "picture/0", "review.js", "ask.js", "live.css", "nothing"):
        _, headers, _ = one_page.ask("GET", one_page.path + path)
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        ), path
        assert (
            headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"
        )
        assert headers["x-frame-options"] == "DENY" and "access-control-allow-origin" not in headers
    _, _, png = one_page.ask("GET", f"{one_page.path}picture/0")
    assert np.asarray(Image.open(BytesIO(png))).shape == (48, 40)


def shown(page: Chrome) -> list[str]:
    """The names on the page, read at once: it may redraw itself at any time."""
    return list(
        page.execute_script(
            "return [...document.querySelectorAll('.tile .name')].map(e => e.textContent)"
        )
    )


def until_left(page: Chrome, num: int, total: int) -> None:
    words = f"{num or 'none'} of {total} left"
    WebDriverWait(page, LIMIT_S, ignored_exceptions=[Exception]).until(
        lambda driver: driver.find_element(By.ID, "left").text == words
    )


def test_a_person_decides_by_keys_and_buttons_undoes_and_is_done(
    tmp_path: Path, browser: Chrome
) -> None:
    made = scanned(tmp_path, num=PAGE_SIZE + 4)
    (made.data / "00.dcm").rename(made.data / f"{HOSTILE.replace('/', '')}.dcm")
    made.scan()
    total = PAGE_SIZE + 4 + 3
    with served(made) as page:
        browser.get(page.url)
        until_left(browser, total, total)
        wait_until(
            lambda: len(browser.find_elements(By.CSS_SELECTOR, ".tile img[src]")) == PAGE_SIZE,
            "pictures",
        )
        drawn_all = (
            "return [...document.querySelectorAll('.tile img')].every(i => i.naturalWidth >= 40)"
        )
        wait_until(lambda: browser.execute_script(drawn_all), "pictures that are drawn")
        names = shown(browser)
        assert len(names) == PAGE_SIZE and "01.dcm" in names
        keys = ActionChains(browser)
        keys.send_keys("c", Keys.PAUSE).perform()
        until_left(browser, total - 1, total)
        assert names[0] not in shown(browser)
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT, "l").perform()
        until_left(browser, total - 2, total)
        assert names[2] not in shown(browser) and names[1] in shown(browser)
        ActionChains(browser).send_keys("u").perform()
        until_left(browser, total - 1, total)
        ActionChains(browser).send_keys(Keys.ENTER).perform()
        large = browser.find_element(By.ID, "large")
        assert large.is_displayed() and ".dcm" in browser.find_element(By.ID, "large-name").text
        ActionChains(browser).send_keys("l").perform()  # and the next one is enlarged
        until_left(browser, total - 2, total)
        assert large.is_displayed()
        ActionChains(browser).send_keys(Keys.ESCAPE).perform()
        browser.find_element(By.ID, "clear-all").click()
        wait_until(lambda: "clip.dcm" in shown(browser), "what comes after")
        browser.find_element(By.CSS_SELECTOR, ".together:not([hidden]) .bad").click()
        wait_until(lambda: "clip.dcm" not in shown(browser), "a whole file left out")
        show_as(browser, "phone")
        assert overflow(browser) == 0
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        browser.find_element(By.ID, "done").click()
        assert page.process.wait(timeout=LIMIT_S) == 0
        assert "left out. The next scan uses these decisions." in page.process.stdout.read()
    summary = scan_at(made.data, made.private, LIMITS)
    assert summary.accepted == PAGE_SIZE + 1 and summary.reasons["left out by a person"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_page_and_its_decoders(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    made = scanned(tmp_path)
    with served(made) as page:
        page.ask("GET", f"{page.path}state")
        wait_until(lambda: running_children(page.process.pid), "decoders")
        decoders = running_children(page.process.pid)
        os.kill(page.process.pid, number)
        assert page.process.wait(timeout=LIMIT_S) == code
        assert page.process.stderr.read().strip().startswith("Interrupted.")
    wait_until(lambda: not any(map(is_running, decoders)), "decoders that end")


def test_a_picture_is_drawn_in_its_window_and_whole(tmp_path: Path) -> None:
    values = np.zeros((1, 20, 30), np.int16)
    values[0, :, 10:20] = 100
    values[0, :, 20:] = 3000
    in_window, whole = (
        np.asarray(Image.open(BytesIO(drawn(Picture(values, window=(0.0, 200.0)), window=window))))
        for window in (True, False)
    )
    assert [int(row) for row in in_window[0, ::10]] == [0, 128, 255]
    assert [int(row) for row in whole[0, ::10]] == [0, 8, 255]
    colours = np.random.default_rng(0).integers(0, 256, (3, 20, 30), dtype=np.uint8)
    for window in (True, False):
        actual = np.asarray(Image.open(BytesIO(drawn(Picture(colours), window=window))))
        assert (actual == np.moveaxis(colours, 0, -1)).all()


def test_text_on_any_slice_of_a_volume_is_seen_and_planes_stand_upright(tmp_path: Path) -> None:
    values = np.zeros((1, 20, 40, 40), np.uint8)
    values[0, 17:] = 100  # the top
    values[0, 3, 5, 5] = 255  # one voxel somewhere
    sheet = np.asarray(
        Image.open(BytesIO(drawn(Picture(values, spacing=(2.0, 1.0, 1.0)), window=False)))
    )
    side = 40
    assert sheet.shape == (2 * side + 6, 3 * side + 12)
    projections = [
        sheet[side + 6 :, start : start + side] for start in (0, side + 6, 2 * side + 12)
    ]
    assert sheet[: side + 1].max() == 100 and all(
        projection.max() > 150 for projection in projections
    )
    coronal = sheet[:side, side + 6 : 2 * side + 6]
    assert coronal[2].min() == 100 and coronal[-3].max() == 0
