"""/ui on a mesh of real processes shows the router's data and no text of prompts or answers."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
from playwright.async_api import Page, Route, async_playwright, expect

from kvmesh.discovery.base import ROUTER
from kvmesh.rpc.router.client import GrpcRouterClient
from tests.integration.mesh import RunningMesh, argv_simulated, running_mesh
from tests.patience import PATIENCE_S
from tests.ui.browser import ARGUMENTS, chromium_path

SECRET = "xylophone"
"""A word of a prompt and of its answer."""
MS = 1000 * PATIENCE_S
ROUTER_WAS_LATE = 503
"""The frontend waits 2 s for the explanation of a router, which may be too short on a busy machine."""
expect.set_options(timeout=MS)


async def explained_terms(mesh: RunningMesh, request_id: str) -> tuple[list[str], list[str]]:
    """Returns the names of the terms in Explain, and the chosen pair."""
    registry, channels = mesh.target.registry(), mesh.target.channels()
    try:
        router = (await registry.instances(ROUTER)).instances[0]
        found = await GrpcRouterClient(channels, router.address).explain(request_id, timeout_s=PATIENCE_S)
    finally:
        await channels.aclose()
        await registry.aclose()
    scored = next(each for each in found.candidates if not each.removed_by)
    placed = found.placement
    assert placed is not None
    return [name for name, _ in scored.terms], [each.worker_id for each in (placed.prefill, placed.decode) if each]


async def asked(mesh: RunningMesh) -> str:
    """Sends a request whose prompt and answer contain SECRET. Returns the mesh's id of the request."""
    body = {"model": "demo", "messages": [{"role": "user", "content": f"{SECRET} " * 20}], "max_tokens": 8}
    async with aiohttp.ClientSession() as session, session.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-kvmesh-request-id"]


async def events_text(mesh: RunningMesh, request_id: str) -> str:
    """Returns all data that the page gets, once it includes the request."""
    async with aiohttp.ClientSession(read_bufsize=1 << 22) as session:
        async with session.get(f"{mesh.url}/ui/events") as response, asyncio.timeout(PATIENCE_S):
            text = ""
            while request_id not in text:
                text = (await response.content.readuntil(b"\n\n")).decode()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with session.get(f"{mesh.url}/ui/explain/chatcmpl-{request_id}") as response:
                    if response.status != ROUTER_WAS_LATE:
                        assert response.status == 200
                        return text + await response.text()


async def explain_patiently(route: Route) -> None:
    """Asks the frontend for an explanation in the page's place, until the router answers in time."""
    while (response := await route.fetch(timeout=MS)).status == ROUTER_WAS_LATE:
        pass
    await route.fulfill(response=response)


async def chat(page: Page) -> None:
    await page.locator("#tab-chat").click()
    await expect(page.locator("#chat-model option")).to_have_text("demo")
    await page.locator("#chat-tokens").fill("12")
    await page.locator("#chat-text").fill("Hello")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn[data-role=assistant] .note")).to_contain_text("12 tokens")
    assert await page.locator(".turn[data-role=assistant] .text").inner_text() != ""


async def test_the_page_shows_a_real_mesh(tmp_path: Path) -> None:
    """The page shows pools, workers, a chat, the decision for it with the router's terms, and a killed worker. It shows no prompt."""
    path = chromium_path()
    argv = argv_simulated("--prefill", "2", "--decode", "2", "--restarts-max", "0")
    async with running_mesh(tmp_path, *argv) as mesh, async_playwright() as playwright:
        request_id = await asked(mesh)
        assert SECRET not in await events_text(mesh, request_id)
        browser = await playwright.chromium.launch(executable_path=path, headless=True, args=ARGUMENTS, timeout=MS)
        try:
            page = await browser.new_page()
            page.set_default_timeout(MS)
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            await page.route("**/ui/explain/*", explain_patiently)
            await page.goto(f"{mesh.url}/ui")
            await expect(page.locator("#workers tbody tr")).to_have_count(4)
            await expect(page.locator("#workers tbody .chip[data-tone=good]")).to_have_count(4)
            await expect(page.locator("#pools tbody tr")).to_have_count(2)
            await chat(page)
            # The explanation is read once, and the router may learn of the end of the chat after the page.
            await expect(page.locator("#requests tbody tr", has_text="finished")).to_have_count(2)
            await page.get_by_role("button", name="Why there?").click()
            picture = page.locator("#picture article")
            await expect(picture.locator(".verdict")).to_be_visible(timeout=MS)
            shown = await page.locator("#explain-id").input_value()
            terms, workers = await explained_terms(mesh, shown)
            assert terms and await picture.locator(".legend li").all_inner_texts() == terms
            await expect(picture.locator(".verdict")).to_contain_text(" → ".join(workers))
            await expect(picture).to_contain_text("finished")
            await page.locator("#tab-mesh").click()
            os.kill(mesh.pids("decode")[0], signal.SIGKILL)
            await expect(page.locator("#workers tbody .chip[data-tone=good]")).to_have_count(3)
            await expect(page.locator("#tiles dd").first).to_contain_text("3")
            assert problems == []
        finally:
            await browser.close()
