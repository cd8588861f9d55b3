"""Asks the held-out prompts of `evaluation/prompts.txt` and prints counts for each kind and the twenty worst answers.

Greedy decoding in float32, one prompt at a time, so that two runs give the same answers. In a dialog the model sees its own
earlier answers. An answer that does not end within the limit is wrong, whatever it holds. `python models/demo/evaluate.py`
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
import xgrammar
from rendering import HERE
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWER_TOKENS_MAX = 128
WORST = 20
PROMPTS = HERE / "evaluation"
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`tools` and `schema` are names in evaluation/tools.json and evaluation/schemas.json."""

    kind: str
    check: str
    turns: list[str]
    expected: str
    tools: list[str]
    schema: str


def prompts(path: Path) -> Iterator[Prompt]:
    """Reads the file; its head says what a line means."""
    kind = check = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            kind, check = line.strip("[]").split()
        elif " => " in line and not line.startswith("#"):
            asked, _, expected = line.rpartition(" => ")
            asked = re.sub(r"\{([^{}]*)\}", r"\1", asked)
            names, asked = asked.split(": ", 1) if check in ("call", "schema") else ("", asked)
            yield Prompt(
                kind=kind,
                check=check,
                turns=asked.split(" // "),
                expected=expected.strip(),
                tools=names.split(", ") if check == "call" else [],
                schema=names if check == "schema" else "",
            )


class Answerer:
    """The model with greedy decoding. With a schema, only tokens that the schema allows, as vLLM does it with xgrammar."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._ends = set(self._model.generation_config.eos_token_id)
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._model.config.vocab_size, stop_token_ids=sorted(self._ends)
        )
        self._compiler = xgrammar.GrammarCompiler(vocabulary)

    @torch.inference_mode()
    def answer(self, messages: list[Message], tools: list[Message], schema: Message | None) -> tuple[str, bool]:
        """The answer, and whether it ended by itself."""
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        allowed = None
        if schema is not None:
            allowed = xgrammar.GrammarMatcher(self._compiler.compile_json_schema(json.dumps(schema)))
        mask = xgrammar.allocate_token_bitmask(1, self._model.config.vocab_size)
        cache, found = None, []
        while len(found) < ANSWER_TOKENS_MAX:
            output = self._model(ids, past_key_values=cache, use_cache=True)
            cache, scores = output.past_key_values, output.logits[:, -1]
            if allowed is not None:
                allowed.fill_next_token_bitmask(mask)
                xgrammar.apply_token_bitmask_inplace(scores, mask)
            token = int(scores.argmax())
            if token in self._ends:
                return str(self._tokenizer.decode(found, skip_special_tokens=True)), True
            if allowed is not None:
                allowed.accept_token(token)
            found.append(token)
            ids = torch.tensor([[token]])
        return str(self._tokenizer.decode(found, skip_special_tokens=True)), False


def _contains(answer: str, expected: str) -> bool:
    def has(part: str) -> bool:
        return re.search(rf"\b{re.escape(part.strip())}", answer, re.IGNORECASE) is not None

    return any(all(has(part) for part in either.split(" & ")) for either in expected.split(" | "))


def _exact(answer: str, expected: str) -> bool:
    """The same but for quotes around it and a mark at its end."""
    found, wanted = (text.strip().strip("\"'").rstrip(".!?").strip("\"'") for text in (answer, expected))
    return found == wanted


def _numbers(answer: str, expected: str) -> bool:
    found = re.findall(r"\d+", answer)
    return found == expected.split() or (len(expected.split()) == 1 and expected in found)


def _call(answer: str) -> Message:
    body = re.fullmatch(r"\s*<tool_call>\n(.*)\n</tool_call>\s*", answer, re.DOTALL)
    try:
        found = json.loads(body[1]) if body else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_called(answer: str, expected: str) -> bool:
    name, _, arguments = expected.partition(" ")
    return _call(answer) == {"name": name, "arguments": json.loads(arguments)}


def _is_object(answer: str, expected: str) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return expected == "*" or bool(value == json.loads(expected))


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "contains": _contains,
    "exact": _exact,
    "numbers": _numbers,
    "call": _is_called,
    "schema": _is_object,
}


def ask(answerer: Answerer, prompt: Prompt) -> tuple[str, bool]:
    """The answer to the last turn, and whether it ended."""
    tools = json.loads((PROMPTS / "tools.json").read_text(encoding="utf-8"))
    schemas = json.loads((PROMPTS / "schemas.json").read_text(encoding="utf-8"))
    messages: list[Message] = []
    answer, is_ended = "", True
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        answer, is_ended = answerer.answer(messages, [tools[name] for name in prompt.tools], schemas.get(prompt.schema))
        messages.append({"role": "assistant", "content": answer})
    return answer, is_ended


def report(asked: Counter[str], right: Counter[str]) -> str:
    """The table for the model card."""
    lines = ["| kind | asked | right | |", "|---|---:|---:|---:|"]
    lines += [f"| {kind} | {count} | {right[kind]} | {right[kind] / count:.0%} |" for kind, count in asked.items()]
    return "\n".join([*lines, f"| **all** | {asked.total()} | {right.total()} | {right.total() / asked.total():.1%} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE, help="model directory")
    parser.add_argument("--prompts", type=Path, default=PROMPTS / "prompts.txt", help="file of prompts")
    parser.add_argument("--kind", nargs="*", default=[], help="these kinds only")
    parser.add_argument("--worst", type=int, default=WORST, help="wrong answers to print")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    answerer = Answerer(arguments.model)
    asked, right, side = Counter[str](), Counter[str](), Counter[str]()
    wrong: list[tuple[float, str]] = []
    for prompt in prompts(arguments.prompts):
        if arguments.kind and prompt.kind not in arguments.kind:
            continue
        answer, is_ended = ask(answerer, prompt)
        is_right = is_ended and CHECKS[prompt.check](answer, prompt.expected)
        asked[prompt.kind] += 1
        right[prompt.kind] += is_right
        if prompt.check == "call":
            side["the right tool of two is called"] += _call(answer).get("name") == prompt.expected.split()[0]
        if prompt.check == "schema":
            side["valid by its schema"] += is_ended and _is_object(answer, "*")
        if not is_right:
            near = SequenceMatcher(None, answer, prompt.expected).ratio()
            line = {
                "kind": prompt.kind,
                "asked": " // ".join(prompt.turns),
                "expected": prompt.expected,
                "answered": answer,
            }
            wrong.append((near, json.dumps(line, ensure_ascii=False)))
    print(report(asked, right))
    for what, count in side.items():
        print(f"{what}: {count}")
    print("\n".join(line for _, line in sorted(wrong)[: arguments.worst]))


if __name__ == "__main__":
    main()
