"""Rendezvous handoff of the simulated engine: both legs start at the same time and find each other by room. README.md describes the steps."""
