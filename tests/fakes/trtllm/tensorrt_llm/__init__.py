"""A fake of TensorRT-LLM: small, deterministic, in one event loop. For tests only. `typings/tensorrt_llm` has its signatures."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__version__ = "1.3.0rc29"
__all__ = ["LLM", "DisaggregatedParams", "SamplingParams"]
