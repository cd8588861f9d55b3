"""The five services. Imports kvmesh before any of them imports gRPC, which reads environment variables that kvmesh sets."""

import kvmesh  # noqa: F401 (for what it sets)
