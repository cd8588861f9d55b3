"""Predicts the load from its history."""
