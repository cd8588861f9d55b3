"""Tests of /ui in a real browser, and of `kvmesh top`."""
