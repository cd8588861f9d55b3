# Origin: llmapi/__init__.py, 5ca85aff65b2c7d0ba06fb6c7d7c015ed78886f8. Configurations are passed as mappings, which pydantic validates;
# their keys are in tests/conformance/published/trtllm_config_keys.txt.
from tensorrt_llm.llmapi.llm import LLM as LLM
from tensorrt_llm.llmapi.llm import RequestOutput as RequestOutput
