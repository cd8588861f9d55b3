"""Traces replayed on virtual time: the router's own core against simulated workers, policy against policy."""
