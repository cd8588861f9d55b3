"""Reads KV events and statistics of the engine, in the background."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmesh.engines.trtllm.settings import TrtllmSettings
from kvmesh.event_log import event_logger

if TYPE_CHECKING:
    from tensorrt_llm.llmapi.llm import LLM

_log = event_logger(__name__)
POLL_S = 0.05
"""Interval of fetching KV events and statistics: the router's index and the load record lag by about so much. A shorter one costs CPU."""
Take = Callable[[Mapping[str, Any]], None]


async def read_statistics(llm: "LLM", take: Take, *, check: Callable[[], None]) -> None:
    """Passes each entry to `take`. Calls `check` after each fetch."""
    while True:
        async for entry in llm.get_stats_async(timeout=POLL_S):
            take(entry)
        check()
        await asyncio.sleep(POLL_S)


async def pull_events(llm: "LLM", take: Take) -> None:
    """Passes each event to `take`, in the engine's order."""
    while True:
        async for event in llm.get_kv_cache_events_async(timeout=POLL_S):
            take(event)
        await asyncio.sleep(POLL_S)


async def subscribe_events(settings: TrtllmSettings, take: Take) -> None:
    """Passes the events that the engine publishes over ZMQ to `take`, those of one socket in their order."""
    async with asyncio.TaskGroup() as group:
        for rank in range(settings.data_parallel_size):
            group.create_task(_subscribe(rank_endpoint(settings.kv_events_endpoint, rank), rank, take))


async def _subscribe(endpoint: str, rank: int, take: Take) -> None:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        while True:
            for event in decode_frames(await socket.recv_multipart(), rank):
                take(event)
    finally:
        socket.close(linger=0)
        context.term()


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Returns the address of a rank's events. The engine adds a data-parallel rank's number to the port."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if rank else endpoint


def decode_frames(frames: Sequence[bytes], rank: int) -> list[dict[str, Any]]:
    """Returns the events of one message, as the pull API gives them. Frames: topic, number, msgpack of [time, events, rank].

    All events of a message have its number once: a gap in it is a gap in the events. A message that cannot be decoded is logged and
    dropped, which the next number shows as a gap.
    """
    import msgspec

    try:
        _, number, payload = frames
        _, events, *more = msgspec.msgpack.decode(payload)
        found = [from_push(named(event)) for event in events]
    except (ValueError, TypeError, KeyError, msgspec.DecodeError):
        _log.warning("kv_events_not_decoded")
        return []
    sender = more[0] if more and more[0] is not None else rank
    head: dict[str, Any] = {"event_id": int.from_bytes(number, "big"), "data": {"type": "number"}}
    return [{**event, "attention_dp_rank": sender} for event in (head, *({"data": data} for data in found))]


NAMES = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Fields in order, for engines that send arrays that begin with the event's name."""
LEVELS = {None: 0, "GPU": 0, "CPU": 1, "STORAGE": 2}


def named(event: Any) -> Mapping[str, Any]:
    """Returns an event as a mapping with its `type`."""
    if isinstance(event, Mapping):
        return event
    return {"type": event[0], **dict(zip(NAMES[event[0]], event[1:], strict=False))}


def from_push(event: Mapping[str, Any]) -> dict[str, Any]:
    if event["type"] == "AllBlocksCleared":
        return {"type": "cleared"}
    if event["type"] == "BlockRemoved":
        return {"type": "removed", "block_hashes": event["block_hashes"]}
    size, tokens = event["block_size"], event["token_ids"]
    blocks = [
        {
            "block_hash": block_hash,
            "tokens": [{"token_id": token_id} for token_id in tokens[index * size : (index + 1) * size]],
            "cache_level": LEVELS.get(event.get("medium"), 0),
        }
        for index, block_hash in enumerate(event["block_hashes"])
    ]
    return {"type": "stored", "parent_hash": event.get("parent_block_hash"), "blocks": blocks}
