"""/ui in a real Chromium, with a real router that lists 64 workers, one of them with a hostile name."""

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.ui.browser import (
    FleetProcess,
    Watched,
    chromium,
    chromium_path,
    load_axe,
    running_fleet,
    serious_findings,
    watched_page,
)
from tests.ui.fleet import HOSTILE, TENANT

TABS = ("mesh", "requests", "planner", "chat")
WORKERS = "#workers tbody tr"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    chromium_path()
    with running_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def watched(browser: Browser, fleet: FleetProcess) -> Iterator[Watched]:
    """The page after the mesh has appeared."""
    with watched_page(browser) as watched:
        watched.page.goto(f"{fleet.url}/ui")
        expect(watched.page.locator("#link")).to_have_text("live")
        expect(watched.page.locator("#pools tbody tr")).to_have_count(2)
        yield watched


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def test_pools_and_64_workers_are_shown(page: Page) -> None:
    """The page shows totals, pools and every worker with its load. Sorting and filtering lose no worker."""
    expect(page.locator(WORKERS)).to_have_count(64)
    assert page.locator("#pools tbody tr").all_inner_texts()[0].split()[:6] == [
        "demo",
        "decode",
        "48",
        "of",
        "48",
        "52",
    ]
    row = page.locator(WORKERS, has_text="decode-05").first
    expect(row).to_contain_text("simulated")
    # Workers are numbered starting with the hostile one, so this is the seventh.
    expect(row.locator(".meter")).to_have_text("13 %")
    expect(page.locator("#tiles dd").first).to_have_text("64of 64")
    page.get_by_role("button", name="KV in use").click()
    expect(page.locator("#workers thead th[aria-sort=descending]")).to_have_text("KV in use")
    shares = [int(text.split()[0]) for text in page.locator(f"{WORKERS} .meter").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    page.locator("#worker-filter").fill("prefill ok")
    expect(page.locator(WORKERS)).to_have_count(16)
    expect(page.locator("#worker-count")).to_have_text("16 of 64")


def test_hostile_names_are_text(page: Page) -> None:
    """A worker's id and a tenant with markup are shown as text, also in the explanation of a decision."""
    expect(page.locator(WORKERS, has_text=HOSTILE)).to_have_count(1)
    page.locator("#tab-requests").click()
    page.get_by_label("Explain request hostile-1").click()
    expect(page.locator("#picture .verdict")).to_contain_text(HOSTILE)
    expect(page.locator("#requests tbody tr", has_text=TENANT)).to_have_count(1)
    assert page.locator("main img, main script").count() == 0
    expect(page).to_have_title("kvmesh")


def test_the_policy_forbids_foreign_code_and_hosts(page: Page, watched: Watched) -> None:
    """The content security policy blocks HTML parsing and requests to other hosts, so that a defect in the page cannot be exploited."""
    assert (
        page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (e) { return e.name; } }")
        == "TypeError"
    )
    with socket.create_server(("127.0.0.2", 0)) as other:
        other.setblocking(False)
        address = f"http://127.0.0.2:{other.getsockname()[1]}"
        assert page.evaluate(BLOCKED, address) == ["connect-src", "img-src"]
        with pytest.raises(BlockingIOError):
            other.accept()
    # The browser reports blocked actions on the console and as requests.
    assert all("Content Security Policy" in text or "Trusted" in text for text in watched.problems), watched.problems
    watched.problems.clear()
    watched.urls[:] = [url for url in watched.urls if not url.startswith(address)]


BLOCKED = """address => new Promise((done) => {
    const found = [];
    addEventListener('securitypolicyviolation', (event) => {
        // The event of the refused assignment may come now.
        if (event.effectiveDirective === 'require-trusted-types-for') return;
        found.push(event.effectiveDirective);
        if (found.length === 2) done(found.sort());
    });
    new Image().src = `${address}/x.png`;
    fetch(address).catch(() => {});
})"""


def test_the_picture_shows_what_the_router_returned(page: Page, fleet: FleetProcess) -> None:
    """The picture shows each term, each candidate's sum, the chosen pair, the expected time and the observed one."""
    explanation = fetched(f"{fleet.url}/ui/explain/request-01")
    page.locator("#tab-requests").click()
    page.get_by_label("Explain request request-01").click()
    picture = page.locator("#picture article")
    expect(picture.locator(".verdict")).to_contain_text(f"{explanation['prefill']} → {explanation['decode']}")
    names = [name for name, _ in explanation["candidates"][0]["terms"]]
    assert names and picture.locator(".legend li").all_inner_texts() == names
    assert picture.locator(".pairs thead th").all_inner_texts() == ["Pair", "Cost by term", "Sum", *names]
    chosen = next(each for each in explanation["candidates"] if each["chosen"])
    numbers = picture.locator(".pairs tr.chosen td.number").all_inner_texts()
    assert numbers == [in_seconds(chosen["cost"]), *(in_seconds(value) for _, value in chosen["terms"])]
    widths = picture.locator(".pairs tr.chosen .stack i").evaluate_all("parts => parts.map(part => part.clientWidth)")
    largest = max(range(len(names)), key=lambda i: chosen["terms"][i][1])
    assert widths[largest] == max(widths) > 0
    expect(picture).to_contain_text(in_seconds(explanation["ttft_expected_s"]))
    expect(picture).to_contain_text(in_seconds(0.08))
    expect(picture).to_contain_text("prompt computed")
    page.get_by_label("Explain request refused-1").click()
    expect(picture.locator(".removed")).to_contain_text("labels")


def in_seconds(value: float) -> str:
    """Formats a time below a second as the page does."""
    return "0 ms" if value == 0 else f"{value * 1000:.0f} ms" if value >= 0.1 else f"{value * 1000:.1f} ms"


def test_a_chat_streams(page: Page, fleet: FleetProcess) -> None:
    """The page shows the first token before there are others. The answer grows, and links to the decision of its request."""
    page.locator("#tab-chat").click()
    expect(page.locator("#chat-model option")).to_have_text(["tiny"])
    answer = page.locator(".turn[data-role=assistant] .text")
    fleet.send("hold")
    try:
        page.locator("#chat-text").fill("say 42")
        page.keyboard.press("Enter")
        expect(answer).to_have_text(re.compile("."))
        begin = answer.inner_text()
        assert begin != "answer 42" and "answer 42".startswith(begin)
    finally:
        fleet.send("release")
    expect(page.locator(".turn[data-role=assistant] .note")).to_contain_text("first token after")
    expect(answer).to_have_text("answer 42")
    expect(page.get_by_role("button", name="Why there?")).to_be_visible()


def test_everything_is_reachable_by_keyboard(page: Page) -> None:
    """Arrow keys change the view, Tab and Enter open a request, Enter sorts and sends. Updates of the page keep the focus."""
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.locator("#tab-mesh").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#view-requests")).to_be_visible()
    expect(page.locator("#tab-requests")).to_be_focused()
    press_until(page, "Tab", "#requests tbody button")
    page.keyboard.press("Enter")
    expect(page.locator("#picture article")).to_be_visible()
    # Several updates later the same button has the focus.
    shown = page.locator("#as-of").inner_text()
    expect(page.locator("#as-of")).not_to_have_text(shown)
    assert page.evaluate("() => document.activeElement.closest('#requests') !== null")
    page.locator("#tab-requests").focus()
    page.keyboard.press("Home")
    expect(page.locator("#view-mesh")).to_be_visible()
    press_until(page, "Tab", "#workers thead button")
    page.keyboard.press("Enter")
    expect(page.locator("#workers thead th[aria-sort=ascending]")).to_have_text("Worker")
    page.locator("#tab-mesh").focus()
    page.keyboard.press("End")
    # Without a model, Enter sends nothing.
    expect(page.locator("#chat-model option")).to_have_text(["tiny"])
    press_until(page, "Tab", "#chat-text")
    page.keyboard.type("say 7")
    page.keyboard.press("Enter")
    expect(page.locator(".turn[data-role=assistant] .text")).to_have_text("answer 7")
    expect(page.locator("#chat-text")).to_be_focused()


def press_until(page: Page, key: str, selector: str, *, times_max: int = 30) -> None:
    """Presses a key until an element that matches has the focus."""
    for _ in range(times_max):
        page.keyboard.press(key)
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} did not get the focus")


def test_the_theme_follows_the_system_until_one_is_chosen(browser: Browser, fleet: FleetProcess) -> None:
    """The page follows prefers-color-scheme until a theme is chosen, and keeps the choice after a reload."""
    with watched_page(browser, color_scheme="dark") as watched:
        page = watched.page
        page.goto(f"{fleet.url}/ui")
        colour = "() => getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(colour)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(colour)
        assert dark != light
        page.get_by_label("Theme").select_option("dark")
        assert page.evaluate(colour) == dark
        page.reload()
        expect(page.get_by_label("Theme")).to_have_value("dark")
        assert page.evaluate(colour) == dark


def test_axe_finds_nothing_serious(page: Page) -> None:
    """axe reports no serious problem with names, roles, structure and contrast of any view, and with contrast in the dark theme."""
    # axe takes a second per thousand elements, and all rows are alike.
    page.locator("#worker-filter").fill("-01")
    load_axe(page)
    for name in TABS:
        page.locator(f"#tab-{name}").click()
        if name == "requests":
            page.get_by_label("Explain request request-01").click()
            expect(page.locator("#picture article")).to_be_visible()
        if name == "chat":
            expect(page.locator("#chat-model option")).to_have_text(["tiny"])
            page.locator("#chat-text").fill("say 1")
            page.keyboard.press("Enter")
            expect(page.locator(".note")).to_be_visible()
        assert serious_findings(page) == [], name
        page.get_by_label("Theme").select_option("dark")
        assert serious_findings(page, "color-contrast") == [], f"{name}, dark"
        page.get_by_label("Theme").select_option("light")


def test_the_planner_view_compares_plan_and_reality(page: Page) -> None:
    """The planner's view shows the missing workers and the missed targets."""
    page.locator("#tab-planner").click()
    decode = page.locator("#plan-pools tbody tr", has_text="decode")
    expect(decode).to_contain_text("4 missing")
    expect(page.locator("#plan-latencies tbody tr")).to_contain_text("310 ms of 500 ms")
    expect(page.locator("#plan-latencies .chip[data-tone=bad]")).to_have_text("missed")
    expect(page.locator("#plan-decisions tbody tr")).to_contain_text("16 + 48 → 16 + 52")


def test_workers_that_drain_or_leave_are_shown_and_announced(page: Page, fleet: FleetProcess) -> None:
    """A worker that drains or leaves is shown and announced to screen readers. Must be the last test, because it changes the fleet."""
    fleet.send("drain decode-07")
    row = page.locator(WORKERS, has_text="decode-07")
    expect(row.locator(".chip")).to_have_text("draining")
    expect(page.locator("#announce")).to_contain_text("decode-07 is draining")
    fleet.send("leave decode-05")
    expect(page.locator(WORKERS)).to_have_count(63)
    expect(page.locator("#announce")).to_contain_text("decode-05 has left")
    expect(page.locator("#tiles dd").first).to_have_text("62of 63")
