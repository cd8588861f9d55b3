from typing import Any

# Origin: sampling_params.py, 000a01de66f0eab4ab05640711f0253f50f5209c.
class GuidedDecodingParams:
    def __init__(
        self,
        *,
        json: str | dict[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        json_object: bool = False,
        structural_tag: str | None = None,
    ) -> None: ...

# Origin: sampling_params.py, 000a01de66f0eab4ab05640711f0253f50f5209c. `embedding_bias` is a float32 tensor of [vocabulary size].
# `_prepare_sampling_params` of llm.py (1.4.0rc1) needs `end_id` when no tokenizer is loaded.
class SamplingParams:
    def __init__(
        self,
        *,
        end_id: int | None = None,
        max_tokens: int = 32,
        stop_token_ids: list[int] | None = None,
        include_stop_str_in_output: bool = False,
        embedding_bias: Any | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        min_tokens: int | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        min_p: float | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        guided_decoding: GuidedDecodingParams | None = None,
        ignore_eos: bool = False,
        detokenize: bool = True,
    ) -> None: ...
