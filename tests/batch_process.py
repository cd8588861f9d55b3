"""A frontend in a separate process that answers slowly, for tests that kill it."""

import argparse
import asyncio
import re
from pathlib import Path

from kvmesh.core import Generation
from services.frontend.models import ServedModel
from services.frontend.settings import BatchSettings, StoresSettings
from tests.frontend_apps import AppSettings, running_apps
from tests.frontend_mesh import FakeMesh, served_model, tokens_of

QUICK = BatchSettings(lease_s=1.0, poll_s=0.05, lines_in_flight_max=4, retry_s_max=0.2)


def answering(model: ServedModel, *, step_s: float = 0.0, hangs_from: int | None = None) -> FakeMesh:
    """Returns a mesh that answers with the last number in the prompt, so that tests can tell the answers apart.

    Answers to `hangs_from` and higher numbers never end, so that a batch cannot end before the test acts on it.
    """

    def number_in(generation: Generation) -> str:
        numbers = re.findall(r"\d+", model.text.decode(generation.token_ids))
        return numbers[-1] if numbers else "none"

    def answer(generation: Generation) -> list[int]:
        return tokens_of(model.text, f"answer {number_in(generation)}")

    async def hang(generation: Generation, sent: int) -> None:
        if hangs_from is not None and int(number_in(generation)) >= hangs_from:
            await asyncio.Event().wait()

    return FakeMesh(answer=answer, step_s=step_s, before_step=hang)


async def main() -> None:
    """Serves until the process is killed. The first line of the output is the address."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("step_s", type=float)
    parser.add_argument("stores_url", nargs="?", default="")
    parser.add_argument("password_file", nargs="?", default="")
    parser.add_argument("--hangs-from", type=int)
    words = parser.parse_args()
    model = served_model(words.model)
    stores = StoresSettings(url=words.stores_url, password_file=words.password_file)
    mesh = answering(model, step_s=words.step_s, hangs_from=words.hangs_from)
    apps = AppSettings(batches=QUICK, stores=stores)
    async with running_apps([model], mesh, words.state, apps=apps, instance_id="doomed") as running:
        print(running.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
