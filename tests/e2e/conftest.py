from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pages import web
from tests.support.pages.person import PATIENCE_S


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # A name that another machine's page could have, and that means this machine now.
        rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        arguments = ["--no-sandbox", "--no-proxy-server", rebound]
        browser = play.chromium.launch(
            executable_path=web.CHROMIUM, args=arguments, timeout=PATIENCE_S * 1000
        )
        yield browser
        browser.close()
