"""The main module of a spawned rank, which imports it first. See ranks.py."""

from kvmesh.engines.vllm.ranks import bind_spawned_rank

bind_spawned_rank()
