"""The simulated engine: real scheduling, real KV bytes, made-up tokens. For development, tests, planning and scale runs."""

from kvmesh.engines.simulated.card import TokenRange
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.engines.simulated.faults import Die, Fault, LoseKv, Refuse, Stall
from kvmesh.engines.simulated.settings import SimulatedSettings, StepProfile, load_profile
from kvmesh.engines.simulated.tokens import expected_tokens

__all__ = [
    "Die",
    "Fault",
    "LoseKv",
    "Refuse",
    "SimulatedEngine",
    "SimulatedSettings",
    "Stall",
    "StepProfile",
    "TokenRange",
    "expected_tokens",
    "load_profile",
]
