# Origin: executor/__init__.py.
from tensorrt_llm.executor.request import LoRARequest as LoRARequest
from tensorrt_llm.executor.result import CompletionOutput as CompletionOutput
from tensorrt_llm.executor.utils import RequestError as RequestError
