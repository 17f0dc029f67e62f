"""Headless Chromium for tests of web pages: Debian's, or the one that playwright keeps; started here and ended here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright Browser. Where there is none, the test that asks is skipped and says why."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    with sync_api.sync_playwright() as play:
        try:
            browser = play.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium could be started (apt-get install chromium): {str(error).splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()
