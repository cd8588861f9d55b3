"""The dialog that asks for the operator's key if API keys are on, in a real Chromium."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from services.frontend.access.keys import hash_of
from tests.ui.browser import (
    FleetProcess,
    chromium,
    chromium_path,
    load_axe,
    running_fleet,
    serious_findings,
    watched_page,
)

OPERATOR, TENANT = "kvm-operator", "kvm-tenant"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    chromium_path()
    folder = tmp_path_factory.mktemp("fleet")
    keys = [
        {"tenant": "ops", "key_sha256": hash_of(OPERATOR), "operator": True},
        {"tenant": "acme", "key_sha256": hash_of(TENANT)},
    ]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    with running_fleet(folder) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_the_page_asks_for_an_operators_key(browser: Browser, fleet: FleetProcess) -> None:
    """The dialog works by keyboard. It asks again, with the reason, after a wrong key and after a key without `operator`.

    The key is in no URL and no storage, so a reload asks again. axe reports no serious problem in either theme.
    """
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(f"{fleet.url}/ui")
        dialog = page.get_by_role("dialog", name="Operator key")
        expect(dialog).to_be_visible()
        expect(page.locator("#key-input")).to_be_focused()
        load_axe(page)
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            assert serious_findings(page) == [], theme
        page.keyboard.press("Escape")
        expect(page.locator("#link")).to_have_text("key needed")
        assert page.locator("#workers tbody tr").count() == 0
        page.get_by_role("button", name="Key").press("Enter")
        for key in ("wrong", TENANT):
            shown = page.locator("#key-reason").inner_text()
            page.locator("#key-input").fill(key)
            page.keyboard.press("Enter")
            expect(page.locator("#key-reason")).not_to_have_text(shown)
            expect(dialog).to_be_visible()
        page.locator("#key-input").fill(OPERATOR)
        page.keyboard.press("Enter")
        expect(page.locator("#workers tbody tr")).to_have_count(64)
        expect(page.locator("#link")).to_have_text("live")
        stored = page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert OPERATOR not in stored + "".join(watched.urls)
        page.reload()
        expect(dialog).to_be_visible()
        # The browser logs the refused requests on the console.
        assert all("401" in problem or "403" in problem for problem in watched.problems), watched.problems
        watched.problems.clear()
