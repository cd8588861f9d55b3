"""A frontend in a separate process that answers slowly, for tests that kill it.

Arguments: MODEL_DIRECTORY STATE_DIRECTORY STEP_S [STORES_URL PASSWORD_FILE].
"""

import asyncio
import re
import sys
from pathlib import Path

from kvmesh.core import Generation
from services.frontend.models import ServedModel
from services.frontend.settings import BatchSettings, StoresSettings
from tests.frontend_apps import AppSettings, running_apps
from tests.frontend_mesh import FakeMesh, served_model, tokens_of

QUICK = BatchSettings(lease_s=1.0, poll_s=0.05, lines_in_flight_max=4, retry_s_max=0.2)


def answering(model: ServedModel, *, step_s: float = 0.0) -> FakeMesh:
    """Returns a mesh that answers with the last number in the prompt, so that tests can tell the answers apart."""

    def answer(generation: Generation) -> list[int]:
        numbers = re.findall(r"\d+", model.text.decode(generation.token_ids))
        return tokens_of(model.text, f"answer {numbers[-1] if numbers else 'none'}")

    return FakeMesh(answer=answer, step_s=step_s)


async def main() -> None:
    """Serves until the process is killed. The first line of the output is the address."""
    model = served_model(Path(sys.argv[1]))
    url, password_file = sys.argv[4:] or ("", "")
    settings = AppSettings(batches=QUICK, stores=StoresSettings(url=url, password_file=password_file))
    mesh = answering(model, step_s=float(sys.argv[3]))
    async with running_apps([model], mesh, Path(sys.argv[2]), apps=settings, instance_id="doomed") as running:
        print(running.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
