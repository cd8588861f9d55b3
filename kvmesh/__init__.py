"""The library that all services share.

gRPC's event engine hands every message through four threads, its older poller through two: waking threads is most of what a small
message costs. Its library writes a line to standard error for each compressed message that it refuses and each handshake that fails, so
that anybody who reaches a port could fill the disk; each failure has a status and a metric, too. GRPC_VERBOSITY=ERROR shows the lines.
gRPC reads both when it is first imported, so they are set here, before anything of the mesh imports it.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
