"""The vLLM adapter: one process, real NIXL, prefill and decode.

Importing `engine` imports neither vllm nor torch: `VllmEngine.start` must set their environment first.
"""
