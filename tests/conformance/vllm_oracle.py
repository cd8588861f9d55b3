"""Runs vLLM's own parsers in a process, with a tokenizer that has every mark as a token."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.conformance.parser_samples import Outcome


def write_tokenizer(directory: Path, marks: Iterable[str]) -> Path:
    """Writes a byte-level tokenizer without merges. Marks are tokens that are not special, so that decoded text keeps them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in sorted(set(marks))])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class VllmOracle:
    """A client of the process `kvmesh.engines.vllm.parsers`."""

    def __init__(self, tokenizer: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvmesh.engines.vllm.parsers", str(tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        )
        self.names = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, **message: Any) -> dict[str, Any]:
        """Sends one message and returns its response."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._read()

    def whole(self, tool: str, reasoning: str, tools: Mapping[str, Any], text: str) -> Outcome | str:
        """Returns what vLLM's parser returns for a whole answer, or the message of its error."""
        functions = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in tools.items()]
        answer = self.ask(op="whole", tool=tool, reasoning=reasoning, tools=functions if tool else [], text=text)
        if "error" in answer:
            return str(answer["error"])
        return Outcome(
            content=answer["content"],
            reasoning=answer["reasoning"],
            calls=[(name, arguments) for name, arguments in answer["calls"]],
            warnings=[],
        )

    def close(self) -> None:
        self._process.communicate()
