"""A run of a batch whose store fails."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import Usage
from kvmesh.errors import UnavailableError
from services.frontend.api.batches.batch_run import BatchRun
from services.frontend.api.batches.lines import BatchLine
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import Claim
from services.frontend.stores.batches import LineResult

ENDPOINT = "/v1/completions"
CLAIM = Claim(
    batch_id="b",
    owner="",
    endpoint=ENDPOINT,
    input_file_id="f",
    status="in_progress",
    is_valid=True,
    epoch=1,
    expires_s=1000.0,
    output_ttl_s=None,
)


class FailingStore:
    """Stores no result. Does not renew the lease once `lines_end` is set."""

    def __init__(self) -> None:
        self.lines_end = asyncio.Event()

    def wall(self) -> float:
        return 0.0

    async def done_lines(self, claim: Claim) -> set[int]:
        return set()

    async def record(self, claim: Claim, results: Sequence[LineResult]) -> None:
        raise UnavailableError("the store failed")

    async def renew(self, claim: Claim) -> str:
        await self.lines_end.wait()
        raise UnavailableError("the lease is not renewed")


async def test_a_run_that_fails_twice_leaves_no_unread_exception(tmp_path: Path) -> None:
    """The first line's result is not stored, and the lease is not renewed while the second line ends because of that. asyncio then logs no
    exception that nobody retrieved."""
    store, unread = FailingStore(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    path = tmp_path / "in.jsonl"
    line = {"method": "POST", "url": ENDPOINT, "body": {"model": "m", "prompt": "x"}}
    path.write_text("".join(json.dumps({"custom_id": name, **line}) + "\n" for name in "ab"))

    @asynccontextmanager
    async def local(_: str) -> AsyncIterator[Path]:
        yield path

    async def answer(_endpoint: str, _owner: str, line: BatchLine) -> LineResult:
        if line.number == 2:
            try:
                await asyncio.Event().wait()
            finally:
                store.lines_end.set()
                for _ in range(20):  # Until the run has been cancelled.
                    await asyncio.sleep(0)
        return LineResult(line=line.number, is_error=False, record=b"{}", usage=Usage())

    async def take() -> None: ...

    resources: Any = SimpleNamespace(
        store=store,
        files=SimpleNamespace(local=local),
        lines=SimpleNamespace(run=answer),
        slots=SimpleNamespace(take=take, release=lambda: None),
        settings=BatchSettings(),
        pipeline=SimpleNamespace(clock=SystemClock(), is_draining=False),
    )
    with pytest.raises(UnavailableError, match="the lease is not renewed"):
        await BatchRun(CLAIM, resources).run()
    gc.collect()
    assert not unread
