"""The main module of a spawned rank, which it imports before anything else: see ranks.py."""

from kvmesh.engines.vllm.ranks import bind_spawned_rank

bind_spawned_rank()
