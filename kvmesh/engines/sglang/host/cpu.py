"""Replaces what SGLang's wheel lacks on a machine without a GPU. `prepare` must run before sglang is imported. Not used on a GPU.

SGLang publishes no CPU build. Its wheel runs on CPU with torch's own attention (`torch_native`), if these gaps are filled:

* `sgl_kernel` is a CUDA package. SGLang imports it and looks up names of its CPU operators. Of these, `torch_native` calls one.
* torchvision's wheel is a CUDA build, whose operators do not load beside a CPU build of torch. Its Python code needs their schemas.
* KV memory lies in host memory, which NIXL calls DRAM. SGLang always says VRAM.
* Pinned memory and CUDA events do not exist.
* SGLang compiles small functions with torch.compile at their first use: penalties, seeds, layers that ranks share. That takes seconds, and ends
  the scheduler on a machine without a C++ compiler. On a CPU they run uncompiled.
* A CUDA build of torch brings NCCL, which SGLang then uses between ranks on whatever device they have. Without it ranks use gloo.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

OPERATORS = "sgl_kernel"
PROBED = "fused_qk_norm"
"""SGLang tests with hasattr whether such operators exist, so they must not."""
FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "arange")
NIXL_METHODS = ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist")
_DEFINED: list[Any] = []
"""Operator libraries: torch removes their schemas when they are collected."""


def prepare() -> None:
    """Fills the gaps that importing SGLang meets. Idempotent."""
    if OPERATORS in sys.modules:
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    sys.modules[OPERATORS] = _stand_in_module()
    sys.meta_path.insert(0, _BeforeTorchvision())
    _allow_unknown_operators()


def prepare_transfers() -> None:
    """Fills the gaps of memory and transfers. Call it after SGLang is imported and before its scheduler is made."""
    _ignore_pinned_memory()
    _name_host_memory()
    _leave_out_nccl()
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except ImportError:
        return  # Mooncake is optional.
    # True pins memory and records a CUDA event for every chunk.
    MooncakeKVSender.supports_host_tensor_indices = False


def _leave_out_nccl() -> None:
    """Behaves as if NCCL could not be loaded, which SGLang takes for a machine without a GPU."""
    from sglang.srt.distributed.device_communicators import pynccl

    def missing(*_: Any) -> Any:
        raise OSError("NCCL is not used on a CPU")

    pynccl.NCCLLibrary = missing


def assign_req_to_token_pool_cpu(  # noqa: PLR0917  # SGLang calls it.
    rows: Any, table: Any, starts: Any, ends: Any, locations: Any, pool_length: int
) -> None:
    """Writes each request's new KV locations into its row of the table, as the kernel of this name does."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        table[row, start:end] = locations[done : done + end - start].to(table.dtype)
        done += end - start


def _stand_in_module() -> types.ModuleType:
    module = types.ModuleType(OPERATORS, "Stands in for SGLang's CUDA package on CPU.")
    module.__spec__ = importlib.machinery.ModuleSpec(OPERATORS, None)
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu  # type: ignore[attr-defined]
    module.__getattr__ = _operator  # type: ignore[method-assign]
    return module


def _operator(name: str) -> Callable[..., Any]:
    """Returns an operator that fails only when it is called."""
    if not name.endswith("_cpu") or name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the operator {OPERATORS}.{name} has no CPU build")

    return missing


def _allow_unknown_operators() -> None:
    """Some model files read `torch.ops.sgl_kernel.<name>_cpu` when they are imported."""
    import torch._ops

    namespace = torch._ops._OpNamespace
    known = namespace.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            if self.name != OPERATORS or not name.endswith("_cpu") or name.startswith(PROBED):
                raise
            return _operator(name)

    namespace.__getattr__ = lenient


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators just before its import."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is not None:
            # torchvision's own operators load beside a CUDA build, and a second definition would abort the process.
            return
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DEFINED.append(library)


def _name_host_memory() -> None:
    """Makes NIXL register and copy SGLang's KV as host memory."""
    try:
        from nixl._api import nixl_agent
    except ImportError:
        return  # Another transfer backend may be in use.

    def host(value: Any) -> Any:
        return "DRAM" if isinstance(value, str) and value in ("VRAM", "cuda") else value

    def with_host_memory(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            options = {name: host(value) for name, value in options.items()}
            return method(self, *(host(argument) for argument in arguments), **options)

        return call

    for name in NIXL_METHODS:
        setattr(nixl_agent, name, with_host_memory(getattr(nixl_agent, name)))


def _ignore_pinned_memory() -> None:
    import torch

    torch.Tensor.pin_memory = lambda self, *_, **__: self

    def unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*arguments: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return factory(*arguments, **options)

        return make

    for name in FACTORIES:
        setattr(torch, name, unpinned(getattr(torch, name)))
