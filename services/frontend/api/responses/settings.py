"""Settings of the Responses API."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSettings:
    """The store of responses."""

    is_on: bool = setting(True, "Keep responses that are to be stored; off: `store` is refused unless false.")
    path: str = setting("", "SQLite file of stored responses; empty: responses.sqlite in the state directory.")
    stores_by_default: bool = setting(True, "Whether a request that does not say `store` is stored, as OpenAI does.")
    ttl_s: float = setting(30 * 86_400.0, "How long a response that nobody continues is kept; 30 days.", min=1)
    stored_bytes_max: int = setting(1 << 30, "Bytes of stored responses; the least recently used go first.", min=1024)
    chain_max: int = setting(256, "Earlier responses that one request may continue, each the next one's basis.", min=1)
    chain_bytes_max: int = setting(8 << 20, "Bytes of the earlier responses that one request continues.", min=1024)
    sweep_s: float = setting(60.0, "Pause between two looks for what is too old or too much.", min=0.05)
    busy_timeout_s: float = setting(5.0, "Longest wait for another process that writes to the file.", min=0.01)
    calls_max: int = setting(1024, "Calls that wait for the store; more are refused with Retry-After.", min=1)
