"""vLLM behind the mesh's engine protocol: one process, real NIXL, prefill and decode.

Importing this package imports neither vllm nor torch: their environment is set first, in `VllmEngine.start`.
"""

from kvmesh.engines.vllm.engine import VllmEngine
from kvmesh.engines.vllm.settings import VllmSettings

__all__ = ["VllmEngine", "VllmSettings"]
