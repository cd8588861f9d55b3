"""In-memory transports and registry: what runs a whole mesh in one event loop, without sockets. Used by tests and benchmarks only."""
