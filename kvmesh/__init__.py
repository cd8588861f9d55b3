"""The library that all services share.

gRPC's event engine hands every message through four threads, its older poller through two: waking threads is most of what a small
message costs. Its library writes a line to standard error for each compressed message that it refuses and each handshake that fails, so
that anybody who reaches a port could fill the disk; each failure has a status and a metric, too. GRPC_VERBOSITY=ERROR shows the lines.
gRPC reads both when it is first imported, so they are set here, before anything of the mesh imports it. aiohttp's HTTP server logs a traceback
for each request that is not HTTP, for which the filter below is.
"""

import logging
import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _is_not_malformed(record: logging.LogRecord) -> bool:
    """Returns False for a request that aiohttp has answered with 400. Anybody who reaches a port could fill the disk with their tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ != "aiohttp.http_exceptions"


logging.getLogger("aiohttp.server").addFilter(_is_not_malformed)
