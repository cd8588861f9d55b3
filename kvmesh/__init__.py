"""The library that all services share.

This module sets variables that gRPC reads when it is first imported, so it sets them before other modules import gRPC. GRPC_EXPERIMENTS:
gRPC's event engine passes every message through four threads, its older poller through two, and waking threads is most of the cost of a
small message. GRPC_VERBOSITY: gRPC writes a line to standard error for each compressed message that it refuses and each failed handshake,
so anybody who reaches a port could fill the disk. Each failure also has a status and a metric. GRPC_VERBOSITY=ERROR shows the lines.
aiohttp's HTTP server logs a traceback for each request that is not HTTP; the filter below drops these.
"""

import logging
import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _is_not_malformed(record: logging.LogRecord) -> bool:
    """Returns False for the log record of a request that aiohttp has answered with 400: anybody who reaches a port could fill the disk
    with tracebacks.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ != "aiohttp.http_exceptions"


logging.getLogger("aiohttp.server").addFilter(_is_not_malformed)
