"""vLLM's parsers in a separate process: `python -m kvmesh.engines.vllm.parsers TOKENIZER_DIRECTORY`.

Importing them loads torch and takes seconds and half a gigabyte, so processes without an engine use this one. It reads a JSON object
per line and answers each with one line, in order:

    (at the start)                                                 {"tools": [names], "reasonings": [names]}
    {"op": "open", "session", "tool", "reasoning", "tools", "prompt_ids"}       {"session"} or {"session", "error"}
    {"op": "push", "session", "text", "ids", "is_last"}            {"session", "parts"} or {"session", "error"}
    {"op": "whole", "tool", "reasoning", "tools", "text", "ids"}   {"content", "reasoning", "calls"} or {"error"}
    {"op": "close", "session"}                                     {"session"}

Parts: ["content", text], ["reasoning", text], ["begin", number, name, id], ["arguments", number, text].
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

HARMONY = "openai"


class ParserSession:
    """Parses one answer."""

    def __init__(self, tokenizer: Any, message: dict[str, Any]) -> None:
        self._request = _request(message)
        self._parser = _parser(tokenizer, message, self._request)
        self._prompt_ids = list(message.get("prompt_ids") or ())
        self._begun: set[int] = set()

    def push(self, text: str, ids: Sequence[int], *, is_last: bool) -> list[list[Any]]:
        """Returns the parts of the next text."""
        delta = self._parser.parse_delta(text, list(ids), self._request, self._prompt_ids, finished=is_last)
        if delta is None:
            return []
        parts: list[list[Any]] = []
        if delta.reasoning:
            parts.append(["reasoning", delta.reasoning])
        if delta.content:
            parts.append(["content", delta.content])
        for call in delta.tool_calls or ():
            parts += self._call(call)
        return parts

    def _call(self, call: Any) -> list[list[Any]]:
        parts: list[list[Any]] = []
        function = call.function
        if function is not None and function.name and call.index not in self._begun:
            self._begun.add(call.index)
            parts.append(["begin", call.index, function.name, call.id or ""])
        if function is not None and function.arguments:
            parts.append(["arguments", call.index, function.arguments])
        return parts


def whole(tokenizer: Any, message: dict[str, Any]) -> dict[str, Any]:
    request = _request(message)
    parser = _parser(tokenizer, message, request)
    ids = message.get("ids") or tokenizer.encode(message["text"], add_special_tokens=False)
    reasoning, content, calls = parser.parse(
        message["text"], request, enable_auto_tools=True, model_output_token_ids=ids
    )
    found = [[call.name, call.arguments] for call in calls or ()]
    return {"content": content or "", "reasoning": reasoning or "", "calls": found}


def _request(message: dict[str, Any]) -> Any:
    tools = message.get("tools") or None
    return ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=tools,
        tool_choice="auto" if tools else None,
        stream=True,
    )


def _parser(tokenizer: Any, message: dict[str, Any], request: Any) -> Any:
    parser = ParserManager.get_parser(
        tool_parser_name=message.get("tool") or None,
        reasoning_parser_name=message.get("reasoning") or None,
        enable_auto_tools=True,
        is_harmony=message.get("tool") == HARMONY,
        tokenizer=tokenizer,
    )
    if parser is None:
        raise ValueError("neither a tool parser nor a reasoning parser is named")
    return parser(tokenizer, request.tools)


class Server:
    """Handles messages in order."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, ParserSession] = {}
        self._operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "push": self._push,
            "close": self._close,
            "whole": lambda message: whole(self._tokenizer, message),
        }

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to a message. Reports any exception of a parser, since parsers are foreign code."""
        named = {"session": message["session"]} if "session" in message else {}
        try:
            return named | self._operations[message["op"]](message)
        except Exception as error:  # noqa: BLE001 (sent to the caller)
            return named | {"error": f"{type(error).__name__}: {error}"[:500]}

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        self._sessions[message["session"]] = ParserSession(self._tokenizer, message)
        return {}

    def _push(self, message: dict[str, Any]) -> dict[str, Any]:
        session = self._sessions[message["session"]]
        return {"parts": session.push(message["text"], message["ids"], is_last=message["is_last"])}

    def _close(self, message: dict[str, Any]) -> dict[str, Any]:
        self._sessions.pop(message["session"], None)
        return {}


def serve(server: Server, lines: IO[str], out: IO[str]) -> None:
    """Runs until the input ends, as it does when the parent process ends."""
    tools, reasonings = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    print(json.dumps({"tools": sorted(tools), "reasonings": sorted(reasonings)}), file=out, flush=True)
    for line in lines:
        print(json.dumps(server.answer(json.loads(line))), file=out, flush=True)


def main() -> int:
    # vLLM and its imports write to standard output, which carries our responses.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Server(AutoTokenizer.from_pretrained(sys.argv[1])), sys.stdin, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
