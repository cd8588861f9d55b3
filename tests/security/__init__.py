"""Attacks, each as a test that fails if the defence is missing."""
