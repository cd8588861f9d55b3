"""Membership of the mesh: its secret, certificates, roles, and the methods that each role may call."""
