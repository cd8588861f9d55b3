"""vLLM behind the mesh's engine protocol: one process, real NIXL, prefill and decode.

Importing `engine` imports neither vllm nor torch, because their environment is set first, in `VllmEngine.start`.
"""
