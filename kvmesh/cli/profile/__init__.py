"""`kvmesh profile`: measures how fast an engine is."""
