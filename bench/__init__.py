"""Load generator, scenarios and side-by-side runs."""

import kvmesh  # noqa: F401 (before gRPC, which reads what is set there)
