"""Attacks. Each test fails if the defence is missing."""
