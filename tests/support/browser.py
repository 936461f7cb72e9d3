"""A real browser without a window, for pages that a person reads: Debian's Chromium, never a downloaded one."""

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver

WIDTHS = {"phone": 390, "desktop": 1280}
_OFFLINE = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
)


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """The session's browser, started at most once."""
    chromium = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*_OFFLINE, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(option)
    # With both paths given, selenium looks for no driver and downloads none.
    opened = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )
    yield opened
    opened.quit()


@pytest.fixture
def browser(one_browser: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """A browser with a desktop's window and an empty page; a test may resize it with `show_as`."""
    show_as(one_browser, "desktop")
    one_browser.get("about:blank")
    yield one_browser
    one_browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def show_as(browser: webdriver.Chrome, device: str, *, dark: bool = False) -> None:
    """Show pages at the width of a `phone` (390 px) or a `desktop`, in light or dark."""
    size = {
        "width": WIDTHS[device],
        "height": 844,
        "deviceScaleFactor": 1,
        "mobile": device == "phone",
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    colours = "dark" if dark else "light"
    scheme = {"name": "prefers-color-scheme", "value": colours}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def overflow(browser: webdriver.Chrome) -> int:
    """By how many pixels the page is wider than the window; 0 means that nobody scrolls sideways."""
    # Not innerWidth: a phone's browser widens the window to what overflows.
    page = "document.documentElement"
    return int(browser.execute_script(f"return {page}.scrollWidth - {page}.clientWidth"))


def scripts_off(browser: webdriver.Chrome, *, off: bool = True) -> None:
    """Turn JavaScript off for the pages that follow, or on again."""
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": off})
