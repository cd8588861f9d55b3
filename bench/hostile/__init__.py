"""Measures how attacks affect a well-behaved client."""
