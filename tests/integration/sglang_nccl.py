"""Runs in a fork of the SGLang fork server: checks what replaces NCCL for a rank on a CPU."""

from importlib import import_module

from kvmesh.engines.sglang.host import cpu

pynccl = import_module("sglang.srt.distributed.device_communicators.pynccl")


def loaded(_: object) -> None:
    """Replaces the library of a CUDA build of torch."""
    print("loaded")


pynccl.NCCLLibrary = loaded  # type: ignore[attr-defined]
cpu.prepare_transfers()
pynccl.NCCLLibrary(None)
