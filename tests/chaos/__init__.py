"""Tests that kill and stop processes of real meshes."""
