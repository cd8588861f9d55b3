"""How long tests wait for what must happen: never a statement about speed, since the machine may be busy with anything."""

PATIENCE_S = 60.0
"""For what takes milliseconds, or a heartbeat, on a quiet machine. Nothing waits this long unless it fails."""
