"""Virtual time for tests. See `kvmesh.simulation.virtual_loop`."""

from kvmesh.simulation.virtual_loop import DeadlockError, VirtualLoop, run_virtual

__all__ = ["DeadlockError", "VirtualLoop", "run_virtual"]
