"""What each engine calls the sampling parameters of a request, or why it refuses them. Every field of SamplingParams has a row.

A text is the engine's own name of a parameter with the same meaning and unit: the adapter copies the value. `TRANSLATED`: code in the
adapter's folder translates it. What an engine refuses only with some settings or after emitted tokens is code, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from kvmesh.core import SamplingParams
from kvmesh.errors import UnsupportedError

FIELD = "generation.sampling"


class NotCopied(Enum):
    """How an engine gets a parameter that is not copied."""

    TRANSLATED = "translated"
    BY_FRONTEND = "applied by the frontend"


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine has no such parameter. The reason is part of the client's error message."""

    reason: str


TRANSLATED, BY_FRONTEND = NotCopied.TRANSLATED, NotCopied.BY_FRONTEND
EngineName = Literal["vllm", "sglang", "trtllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What the engines call one parameter."""

    vllm: str | NotCopied | Refused
    sglang: str | NotCopied | Refused
    trtllm: str | NotCopied | Refused


def _same(name: str) -> Names:
    return Names(vllm=name, sglang=name, trtllm=name)


SAMPLING_NAMES: Mapping[str, Names] = {
    "temperature": Names(vllm="temperature", sglang="temperature", trtllm=TRANSLATED),
    "top_p": Names(vllm="top_p", sglang="top_p", trtllm=TRANSLATED),
    "top_k": Names(vllm="top_k", sglang=TRANSLATED, trtllm=TRANSLATED),
    "min_p": _same("min_p"),
    "presence_penalty": _same("presence_penalty"),
    "frequency_penalty": _same("frequency_penalty"),
    "repetition_penalty": _same("repetition_penalty"),
    "seed": Names(vllm="seed", sglang=TRANSLATED, trtllm=TRANSLATED),
    "max_tokens": Names(vllm=TRANSLATED, sglang=TRANSLATED, trtllm=TRANSLATED),
    "min_tokens": Names(vllm=TRANSLATED, sglang=TRANSLATED, trtllm=TRANSLATED),
    "stop": Names(vllm=BY_FRONTEND, sglang=BY_FRONTEND, trtllm=BY_FRONTEND),
    "stop_token_ids": Names(vllm=TRANSLATED, sglang=TRANSLATED, trtllm=TRANSLATED),
    "ignore_eos": Names(vllm="ignore_eos", sglang="ignore_eos", trtllm=TRANSLATED),
    "logprobs": Names(vllm="logprobs", sglang=TRANSLATED, trtllm=TRANSLATED),
    "prompt_logprobs": Names(vllm="prompt_logprobs", sglang=TRANSLATED, trtllm=TRANSLATED),
    "logit_bias": Names(vllm=TRANSLATED, sglang=TRANSLATED, trtllm=TRANSLATED),
    "constraint": Names(vllm=TRANSLATED, sglang=TRANSLATED, trtllm=TRANSLATED),
    "skip_special_tokens": Names(vllm=BY_FRONTEND, sglang=BY_FRONTEND, trtllm=BY_FRONTEND),
}


def copied_arguments(engine: EngineName, sampling: SamplingParams) -> dict[str, Any]:
    """Returns the values that the request gives and the engine takes unchanged, by the engine's names.

    Raises UnsupportedError for a given parameter that the engine refuses.
    """
    for name, refused in _REFUSED[engine].items():
        if getattr(sampling, name) is not None:
            raise UnsupportedError(refused.reason, field=f"{FIELD}.{name}")
    return {
        engine_name: value
        for name, engine_name in _COPIED[engine].items()
        if (value := getattr(sampling, name)) is not None
    }


def _rows(engine: EngineName, kind: type) -> dict[str, Any]:
    return {name: cell for name, names in SAMPLING_NAMES.items() if isinstance(cell := getattr(names, engine), kind)}


_ENGINES: tuple[EngineName, ...] = ("vllm", "sglang", "trtllm")
_COPIED: Mapping[EngineName, Mapping[str, str]] = {each: _rows(each, str) for each in _ENGINES}
_REFUSED: Mapping[EngineName, Mapping[str, Refused]] = {each: _rows(each, Refused) for each in _ENGINES}
