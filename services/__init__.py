"""The five services. Whoever imports one has kvmesh imported before gRPC, which reads what is set there."""

import kvmesh  # noqa: F401 (for what it sets)
