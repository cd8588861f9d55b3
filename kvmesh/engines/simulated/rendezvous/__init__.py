"""Rendezvous handoff of the simulated engine: both legs start at once and find each other by room. README.md describes the steps."""
