"""Decides what to change."""
