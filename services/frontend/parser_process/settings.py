"""Limits of parser processes."""

from dataclasses import dataclass

from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """One process per model whose parser is named `vllm:NAME`."""

    start_timeout_s: float = setting(120.0, "Longest wait for the process; it imports torch.", min=1.0)
    reply_timeout_s: float = setting(30.0, "Longest wait for what it makes of an answer that is over.", min=0.1)
    restart_pause_s: float = setting(
        1.0, "Pause before a process that is gone is started again; doubled up to a minute.", min=0.1
    )
    answers_max: int = setting(512, "Answers read at a time; more are refused with Retry-After.", min=1)
    line_bytes_max: int = setting(16 << 20, "Longest reply.", min=65_536)
