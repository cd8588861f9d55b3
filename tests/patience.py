"""The timeout of tests. It makes no statement about speed, because the machine may be busy."""

PATIENCE_S = 60.0
"""Timeout for operations that take milliseconds, or one heartbeat, on an idle machine. Only a failing test waits this long."""
