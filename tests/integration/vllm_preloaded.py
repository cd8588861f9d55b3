"""Runs in a fork of the vLLM fork server. Prints the server's number of threads, and imports gRPC, which the server has not imported."""

import os
import sys
from importlib import import_module

assert "grpc" not in sys.modules
assert "vllm.v1.worker.cpu_worker" in sys.modules
print(len(os.listdir(f"/proc/{os.getppid()}/task")))
import_module("grpc.aio")
import_module("opentelemetry.exporter.otlp.proto.grpc")
sys.stdout.flush()
os._exit(0)
