"""The part of TensorRT-LLM's published API that `kvmesh/engines/trtllm` uses. No code of it; nothing of it was run here.

Each origin names a file of the repository NVIDIA/TensorRT-LLM under `tensorrt_llm/`, and the commit that it was read at, or the project's
reference on engines where no published source was at hand ("reference, section 3": releases 1.3.0rc27 to 1.4.0rc1).
`tests/unit/test_trtllm_stubs.py` compares the fake engine of the tests with these files.
"""

# Origin: __init__.py, and llm.py of 1.4.0rc1 (`from tensorrt_llm import LLM, SamplingParams`).
from tensorrt_llm.disaggregated_params import DisaggregatedParams as DisaggregatedParams
from tensorrt_llm.llmapi.llm import LLM as LLM
from tensorrt_llm.sampling_params import SamplingParams as SamplingParams

# Origin: version.py.
__version__: str
