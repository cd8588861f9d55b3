"""All engines. To add one, write an adapter package and add its registration here."""

from typing import Any

from kvmesh.engines.registration import EngineRegistration
from kvmesh.engines.simulated.registration import SIMULATED
from kvmesh.engines.vllm.registration import VLLM

ENGINES: dict[str, EngineRegistration[Any]] = {engine.name: engine for engine in (VLLM, SIMULATED)}
