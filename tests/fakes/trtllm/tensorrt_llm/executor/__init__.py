"""See the package."""

from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput
from tensorrt_llm.executor.utils import RequestError

__all__ = ["CompletionOutput", "LoRARequest", "RequestError"]
