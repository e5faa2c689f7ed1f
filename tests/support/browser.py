"""Headless Chromium for tests of the page: how it is started, and what it did on the network and the console."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium(profile: Path, *, width: int = 1280, height: int = 900, flags: Sequence[str] = ()) -> Iterator[Chrome]:
    """A browser with an empty profile; where there is none the test skips, under CI it fails."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        missing = "needs Chromium and its driver: apt-get install chromium chromium-driver"
        if "CI" in os.environ:  # a skip would stay unseen there
            pytest.fail(f"{missing}. .ci/run tries that, and says why it could not. Without the variable CI this test skips.")
        pytest.skip(missing)
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # A proxy of the surroundings must not come between the driver and this machine.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    browser = Chrome(options=options, service=Service(driver, env=environment))
    try:
        yield browser
    finally:
        browser.quit()


def requested_hosts(browser: Chrome) -> set[str]:
    """`host:port` of everything the page has asked for since the last call; the browser's own pages apart."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return {urlsplit(url).netloc for url in urls if urlsplit(url).scheme in ("http", "https", "ws", "wss")}


def console_errors(browser: Chrome) -> list[str]:
    """Errors and warnings on the console since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
