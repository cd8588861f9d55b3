"""Why a connection failed, in words for people."""

import os
import socket


def connection_cause(error: Exception, *, timeout_s: float | None = None) -> str:
    """Returns a few words, such as "Connection refused". An HTTP client's error repeats the address, and a timeout has no message."""
    if isinstance(error, TimeoutError):
        return "no answer in time" if timeout_s is None else f"no answer within {timeout_s:g} s"
    inner = getattr(error, "os_error", error)
    if isinstance(inner, OSError) and not isinstance(inner, socket.gaierror) and inner.errno:
        return os.strerror(inner.errno)
    return str(getattr(inner, "strerror", None) or error)
