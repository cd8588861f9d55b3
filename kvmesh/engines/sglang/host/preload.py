"""Imports SGLang in a process that then forks engine processes."""

import gc
import importlib

from kvmesh.engines.sglang.host import cpu
from kvmesh.engines.sglang.host.environment import set_process_defaults, uses_cpu
from kvmesh.lifecycle.import_threads import single_threaded_imports

MODULES = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.disagg_service",
    "sglang.srt.models.registry",
    "sglang.srt.models.llama",
    "sglang.srt.model_loader.loader",
    "sglang.srt.disaggregation.nixl.conn",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.constrained.xgrammar_backend",
    "kvmesh.engines.sglang.host.rank",
    "kvmesh.engines.sglang.host.scheduler",
    "kvmesh.engines.sglang.host.factors",
    "kvmesh.engines.sglang.host.arguments",
)


def preload() -> None:
    """Imports all that a CPU engine imports. Starts no thread."""
    set_process_defaults()
    with single_threaded_imports({}):
        if uses_cpu():
            cpu.prepare()
        for name in MODULES:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
