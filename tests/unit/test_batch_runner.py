"""The runner of batches keeps its slots in use, whatever happens while the store answers."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.frontend.api.batches import runner
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import Claim
from tests.virtual_loop import run_virtual


def claim_of(name: str) -> Claim:
    return Claim(
        batch_id=name, owner=name, endpoint="/v1/chat/completions", input_file_id="f", status="validating", is_valid=False, epoch=1,
        expires_s=100.0, output_ttl_s=None,
    )  # fmt: skip


class Store:
    """Two batches of two owners. `on_question` runs while the store answers whether an owner waits."""

    def __init__(self) -> None:
        self.waiting = [claim_of("a"), claim_of("b")]
        self.claimed_at_s: list[float] = []
        self.on_question: Callable[[], None] = lambda: None

    async def claim(self) -> Claim | None:
        if not self.waiting:
            return None
        self.claimed_at_s.append(asyncio.get_running_loop().time())
        return self.waiting.pop(0)

    async def has_waiting_owner(self) -> bool:
        is_waiting = bool(self.waiting)
        self.on_question()
        for _ in range(10):
            await asyncio.sleep(0)
        return is_waiting

    async def sweep(self) -> int:
        return 0


def test_a_batch_that_ends_while_the_store_answers_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch starts at once. The runner used to end with an error, because it looked for a batch to stop and there was none."""

    async def main() -> list[float]:
        store, ends = Store(), asyncio.Event()
        store.on_question = ends.set

        class Run:
            is_leaving, age_s = False, 0.0

            def __init__(self, claim: Claim, resources: Any) -> None:
                self.owner = claim.owner

            async def run(self) -> None:
                await ends.wait()

        monkeypatch.setattr(runner, "BatchRun", Run)
        settings = BatchSettings(running_max=1, poll_s=60.0)
        resources: Any = SimpleNamespace(
            store=store, files=store, settings=settings, pipeline=SimpleNamespace(is_draining=False)
        )
        running = asyncio.create_task(BatchRunner(resources).run())
        await asyncio.sleep(1.0)
        assert not running.done(), running.exception()
        running.cancel()
        await asyncio.wait({running})
        return store.claimed_at_s

    assert run_virtual(main()) == [0.0, 0.0]
