"""Answers read by vLLM's parsers in a process of their own: for families that this frontend does not read itself."""
