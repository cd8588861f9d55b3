"""See the package."""

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.request_output import RequestOutput

__all__ = ["LLM", "RequestOutput"]
