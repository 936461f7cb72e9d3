"""Takes the documentation's screenshots of the pages that people see while the demo runs; needs Debian's Chromium.

The command is `python examples/digits_three_silos/run.py --screenshots docs/pictures`.
"""

import base64
import getpass
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait
from shell import Demo, DemoError

# In pixels. A page of the documentation is about 800 wide, so that the text of a screenshot stays readable there.
WIDTH = 900
_DRAWING_S = 300.0
# The pages use few colours: with a palette, a file has a third of the bytes.
_NUM_COLOURS = 256
_ALL_SAMPLES = """
const places = [...document.querySelectorAll('.sheet .pictures > *')];
return places.length > 0 && places.every(place => place.naturalWidth > 0);
"""
# The text and the height of a page above its first element that a selector names.
_UPPER_PART = """
const end = document.querySelector(arguments[0]);
const range = document.createRange();
range.setStart(document.body, 0);
range.setEndBefore(end);
return [range.toString(), end.getBoundingClientRect().top + window.scrollY];
"""
_BELOW_SILOS = ".sides"
# The page goes on with every file, every number and the names of users.
_BELOW_CURVES = "h2:has(+ .files)"


def take_screenshots(demo: Demo, silo: str, out: Path) -> None:
    """Write live-page.png and review-page.png.

    Args:
        demo: a demo whose silo awaits approval.
        silo: that silo.
        out: folder for the pictures.

    Raises:
        DemoError: Chromium is not installed, or a page names this machine, its user or a folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        address = ("--address", "127.0.0.1:0")
        with demo.serve("aggregator", "status", demo.out / "fed", "--serve", *address) as url:
            browser.get(url)
            save_upper_part(browser, _BELOW_SILOS, out / "live-page.png", demo)
        with demo.serve("silo", "review", demo.out / silo, "--page") as url:
            browser.get(url)
            WebDriverWait(browser, _DRAWING_S).until(
                lambda page: page.execute_script(_ALL_SAMPLES), "the experts' samples"
            )
            save_upper_part(browser, _BELOW_CURVES, out / "review-page.png", demo)


@contextmanager
def open_browser() -> Iterator[Chrome]:
    """Start Chromium without a window.

    Raises:
        DemoError: it is not installed.
    """
    chromium = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise DemoError("screenshots need Debian's packages chromium and chromium-driver.")
    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = chromium
        for option in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-proxy-server",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(option)
        # With both paths given, selenium downloads nothing.
        browser = Chrome(options=options, service=ChromeService(executable_path=driver))
        size = {"width": WIDTH, "height": WIDTH, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield browser
        finally:
            browser.quit()


def save_upper_part(browser: Chrome, selector: str, path: Path, demo: Demo) -> None:
    """Save the part of a page above the first element that a selector names.

    Raises:
        DemoError: the part names this machine, its user or a folder.
    """
    upper_text, height = browser.execute_script(_UPPER_PART, selector)
    for name in (getpass.getuser(), socket.gethostname(), str(demo.out), str(Path.home())):
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", upper_text):
            raise DemoError(
                f"no screenshot: the page shows {name!r}, which identifies this machine."
            )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": int(height), "scale": 1}
    answer = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
    )
    with Image.open(BytesIO(base64.b64decode(answer["data"]))) as screenshot:
        screenshot.convert("RGB").quantize(_NUM_COLOURS).save(path, optimize=True)
    print(f"  {path}")
