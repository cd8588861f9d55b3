"""The address and the ports of a service: chosen once at its start, from two settings."""
