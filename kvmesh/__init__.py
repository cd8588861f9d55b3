"""The library that all services share.

gRPC's event engine hands every message through four threads, its older poller through two: waking threads is most of what a small
message costs. gRPC reads this when it is first imported, so it is said here, before anything of the mesh imports it.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
