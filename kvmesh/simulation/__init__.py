"""In-memory transports and registry: what runs a whole mesh in one event loop, without sockets. For simulations, tests and benchmarks."""
