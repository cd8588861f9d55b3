"""See the package."""

from tensorrt_llm.executor.result import GenerationResult


class RequestOutput(GenerationResult):
    """See the stub."""
