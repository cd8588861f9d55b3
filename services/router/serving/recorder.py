"""Recordings of the traffic for simulations: lengths, times and shared blocks of requests that finished, never a token."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from hashlib import blake2b

from kvmesh.core import Report
from kvmesh.core.whatif import RecordedBatch, RecordedTraffic
from kvmesh.errors import OverloadedError
from services.router.explain import DecisionHistory, DecisionRecord

BLOCK_TOKENS = 512
"""As in published traces. Block hashes are chained, so the hash of a long block is that of its last short one."""
WATCHERS_MAX = 4
UNREAD_MAX = 4096
"""Requests that a slow reader may lag behind; the oldest ones are lost then, and counted."""
BATCH_MAX = 256


class RequestRecorder:
    """Costs nothing while no reader records.

    It returns block hashes only after hashing them again with the reader's salt, so that two recordings cannot be compared.
    """

    def __init__(self, history: DecisionHistory) -> None:
        self._history = history
        self._watchers: list[_Watcher] = []
        self._is_closed = False

    async def watch(self, salt: bytes) -> AsyncGenerator[RecordedBatch, None]:
        """Yields requests that finish from now on. Raises OverloadedError beyond WATCHERS_MAX readers. Ends with `close`."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise OverloadedError(
                f"{WATCHERS_MAX} recordings are already running", reason="recordings_full", retry_after_s=60.0
            )
        watcher = _Watcher(salt)
        self._watchers.append(watcher)
        self._history.on_finished = self._on_finished
        try:
            while not self._is_closed:
                if batch := watcher.take():
                    yield batch
                else:
                    await watcher.changed.wait()
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._history.on_finished = None

    def close(self) -> None:
        """Ends all recordings: they must not delay the server's stop."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.changed.set()

    def _on_finished(self, record: DecisionRecord, report: Report) -> None:
        for watcher in self._watchers:
            watcher.add(record, report.output_tokens)


class _Watcher:
    """One reader."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._unread: deque[RecordedTraffic] = deque()
        self._lost = 0
        self.changed = asyncio.Event()

    def add(self, record: DecisionRecord, output_tokens: int) -> None:
        if len(self._unread) >= UNREAD_MAX:
            self._unread.popleft()
            self._lost += 1
        ask = record.ask
        self._unread.append(
            RecordedTraffic(
                arrived_at_s=record.decided_at_s,
                prompt_tokens=ask.prompt_tokens,
                output_tokens=max(1, output_tokens),
                block_ids=salted_blocks(ask.block_hashes, ask.block_size_tokens, self._salt),
            )
        )
        self.changed.set()

    def take(self) -> RecordedBatch | None:
        """Returns unread requests, at most BATCH_MAX; None if there are none."""
        # Before the check, so that no call of `add` is missed.
        self.changed.clear()
        if not self._unread:
            return None
        requests = [self._unread.popleft() for _ in range(min(BATCH_MAX, len(self._unread)))]
        if self._unread:
            self.changed.set()
        lost, self._lost = self._lost, 0
        return RecordedBatch(requests=tuple(requests), lost_requests=lost)


def salted_blocks(hashes: Sequence[int], block_size_tokens: int, salt: bytes) -> tuple[int, ...]:
    """Returns the ids of a prompt's blocks of BLOCK_TOKENS tokens; equal ids mean equal prompts up to there.

    Empty if the engine's blocks do not divide BLOCK_TOKENS.
    """
    if block_size_tokens < 1 or BLOCK_TOKENS % block_size_tokens:
        return ()
    stride = BLOCK_TOKENS // block_size_tokens
    # The last short block of each long one. A long block that is not full is left out.
    return tuple(_salted(hashes[at], salt) for at in range(stride - 1, len(hashes), stride))


def _salted(block_hash: int, salt: bytes) -> int:
    digest = blake2b(block_hash.to_bytes(8, "little"), digest_size=8, key=salt).digest()
    return int.from_bytes(digest, "little") >> 1
