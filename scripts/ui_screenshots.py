"""Takes the pictures of docs/use/ui.md: /ui in Chromium, light and dark, and `kvmesh top`, for a simulated mesh under load.

    .venv/bin/python scripts/ui_screenshots.py

Needs the packages of the tests and Chromium (docs/use/ui.md). Takes about a minute.
"""

import asyncio
import io
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import aiohttp
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright
from textual.coordinate import Coordinate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kvmesh.cli.connection import connect  # noqa: E402
from kvmesh.cli.top import TopSettings  # noqa: E402
from kvmesh.cli.top_app import MeshSource, TopApp  # noqa: E402
from kvmesh.cli.top_tables import WORKERS, MeshTable  # noqa: E402
from tests.integration.mesh import RunningMesh, argv_simulated, running_mesh  # noqa: E402
from tests.ui.browser import ARGUMENTS, chromium_path  # noqa: E402

PICTURES = ROOT / "docs" / "use" / "pictures"
SIZE = {"width": 1440, "height": 860}
COLOURS = 128
"""Enough for a page of text. A picture takes a third of the bytes."""
RATE = [column.title for column in WORKERS].index("Output/s")
STREAMS, WARM_S = 24, 12.0
PLANNER = "--planner-args=--mode dry_run --interval-s 2 --targets-ttft-s 0.5 --targets-itl-s 0.05"
ENGINE = "--engine-args=--simulated-kv-blocks 320"
"""A small cache, so that a visible part of it is in use."""
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Removed, so that a picture loads nothing from other hosts."""


async def ask(session: aiohttp.ClientSession, url: str, generator: Random) -> str:
    """Sends one request and reads its answer. Returns the request id."""
    topic = generator.randrange(6)
    words = f"Document {topic}. " + "The mesh moves blocks between workers. " * (4 + 4 * topic)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": generator.randrange(60, 220),
        "stream": True,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        async for _ in response.content.iter_any():
            pass
        return response.headers.get("x-kvmesh-request-id", "")


@asynccontextmanager
async def load(url: str) -> AsyncIterator[list[str]]:
    """Runs streams that send one request after another. Yields the ids of the requests that ended."""
    ended: list[str] = []

    async def stream(number: int, session: aiohttp.ClientSession) -> None:
        generator = Random(number)
        while True:
            ended.append(await ask(session, url, generator))

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(stream(number, session)) for number in range(STREAMS)]
        try:
            yield ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def picture(page: Page, name: str) -> None:
    """Writes the visible page as a PNG with few colours."""
    image = Image.open(io.BytesIO(await page.screenshot())).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


async def take_page(browser: Browser, url: str, scheme: str, request_id: str) -> None:
    """Takes the views of the page in one colour scheme."""
    context = await browser.new_context(color_scheme="dark" if scheme == "dark" else "light", viewport=SIZE)  # type: ignore[arg-type]
    page = await context.new_page()
    await page.goto(f"{url}/ui")
    await page.locator("#workers tbody tr").first.wait_for()
    await asyncio.sleep(WARM_S)
    await picture(page, f"mesh-{scheme}")
    if scheme == "light":
        await page.locator("#tab-requests").click()
        await page.locator("#explain-id").fill(request_id)
        await page.keyboard.press("Enter")
        await page.locator("#picture article").wait_for()
        await picture(page, "decision")
        await page.locator("#tab-planner").click()
        await picture(page, "planner")
    await context.close()


async def take_top(mesh: RunningMesh) -> None:
    """Takes the terminal view as SVG."""
    settings = TopSettings()
    async with connect(mesh.target) as connection:
        app = TopApp(MeshSource(connection, settings), title="kvmesh top", interval_s=0.5)
        async with app.run_test(size=(132, 24)) as pilot:
            workers = app.query_one("#workers", MeshTable)
            while not workers.row_count or str(workers.get_cell_at(Coordinate(0, RATE))) == "-":
                await pilot.pause(0.5)
            svg = app.export_screenshot(title="kvmesh top")
    lines = [line.rstrip() for line in FONTS.sub("", svg).splitlines()]
    (PICTURES / "top.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


async def main() -> None:
    """Takes all pictures of one mesh."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = chromium_path()
    argv = argv_simulated("--prefill", "3", "--decode", "5", PLANNER, ENGINE)
    with tempfile.TemporaryDirectory() as folder:
        async with running_mesh(Path(folder), *argv) as mesh, load(mesh.url) as ended, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path, headless=True, args=ARGUMENTS)
            await asyncio.sleep(WARM_S)
            for scheme in ("light", "dark"):
                await take_page(browser, mesh.url, scheme, ended[-1])
            await browser.close()
            await take_top(mesh)
    for each in sorted(PICTURES.iterdir()):
        print(f"{each.relative_to(ROOT)}: {each.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    asyncio.run(main())
