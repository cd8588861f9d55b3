"""All engines. To add one, write an adapter package and add its registration here."""

from typing import Any

from kvmesh.engines.registration import EngineRegistration
from kvmesh.engines.sglang.registration import SGLANG
from kvmesh.engines.simulated.registration import SIMULATED
from kvmesh.engines.trtllm.registration import TRTLLM
from kvmesh.engines.vllm.registration import VLLM

ENGINES: dict[str, EngineRegistration[Any]] = {engine.name: engine for engine in (VLLM, SGLANG, TRTLLM, SIMULATED)}
