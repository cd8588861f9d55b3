"""Tests of compose/ in real containers."""
