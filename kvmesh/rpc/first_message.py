"""Reads the first message of a stream within a time limit."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from kvmesh.errors import UnavailableError

T = TypeVar("T")
HELLO_TIMEOUT_S = 10.0
"""Longest time from the start of a stream to its first message."""


async def first_message(messages: AsyncIterator[T]) -> T | None:
    """Returns None if the stream ended without a message.

    Raises UnavailableError on timeout, so that a caller that was paused opens the stream again.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(messages), None)
    except TimeoutError:
        raise UnavailableError(f"no hello within {HELLO_TIMEOUT_S:g} s", reason="no_hello") from None
