"""Replays traces in virtual time, with the router's core and simulated workers, to compare policies."""
