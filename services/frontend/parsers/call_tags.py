"""Calls as structural tags (xgrammar's format, which vLLM and SGLang compile): free text, and calls whose arguments are valid. Pure.

The tags hold what a family's template shows, not all that its reader in `parsers/` puts up with. Marks that the reader takes for
a call without its section are kept out of free text, so that no call gets past its schema. Families without a line here write
arguments in ways that xgrammar has no style for (pythonic, gemma), or with tokens that not every tokenizer spells as text (harmony,
mistral).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.parsers import deepseek, kimi

Schema = Mapping[str, Any]
Format = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallTag:
    """A spelling of one call. `begin`: with `%s` for the name. `ends`: any of them. `style`: xgrammar's word for how arguments
    are written. `between`: formats between `begin` and the arguments."""

    begin: str
    ends: Sequence[str]
    style: str = "json"
    between: Sequence[Format] = ()

    def tag(self, name: str, schema: Schema) -> Format:
        """With the arguments of a function."""
        content: Format = {"type": "json_schema", "json_schema": schema, "style": self.style}
        if self.between:
            content = {"type": "sequence", "elements": [*self.between, content]}
        return {"type": "tag", "begin": self.begin.replace("%s", name), "content": content, "end": [*self.ends]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """What stands around and between calls. `mark`: the part of the beginning behind which nothing but calls may come."""

    mark: str
    rest: str = ""
    separator: str = ""
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """How a family writes calls. `marks`: as in a section, for calls without one. `excluded`: what free text may not hold."""

    calls: Sequence[_CallTag]
    marks: Sequence[str] = ()
    sections: Sequence[_Section] = ()
    excluded: Sequence[str] = ()

    def document(self, tools: Iterable[tuple[str, Schema]], *, is_parallel: bool) -> Format:
        """The structural tag for these functions, by name and schema of the arguments."""
        tags = [call.tag(name, schema) for name, schema in tools for call in self.calls]
        form: Format = {
            "type": "triggered_tags",
            "triggers": [section.mark for section in self.sections] or [*self.marks],
            "tags": [_section_tag(section, tags, is_parallel=is_parallel) for section in self.sections] or tags,
            "stop_after_first": not is_parallel,
        }
        if self.excluded:
            form["excludes"] = [*self.excluded]
        return {"type": "structural_tag", "format": form}


def _section_tag(section: _Section, tags: Sequence[Format], *, is_parallel: bool) -> Format:
    calls = {
        "type": "tags_with_separator", "tags": [*tags], "separator": section.separator, "at_least_one": True,
        "stop_after_first": not is_parallel,
    }  # fmt: skip
    return {"type": "tag", "begin": section.mark + section.rest, "content": calls, "end": section.closing}


def _json_call(before: str = "", behind: str = "") -> _CallTag:
    return _CallTag(begin=f'{before}{{"name": "%s", "arguments": ', ends=(f"}}{behind}",))


def _json_list(*marks: tuple[str, str, str], excluded: Sequence[str] = ()) -> CallTags:
    """`marks`: see _Section; each with what comes behind the list's bracket. `excluded`: see CallTags."""
    sections = [_Section(mark=mark, rest=rest, separator=", ", closing=f"]{end}") for mark, rest, end in marks]
    return CallTags(calls=(_json_call(),), sections=sections, excluded=excluded)


def _invoke(prefix: str, style: str, *words: str) -> CallTags:
    """`words`: names of the section's tag."""
    call = _CallTag(begin=f'<{prefix}invoke name="%s">\n', ends=(f"</{prefix}invoke>\n",), style=style)
    sections = [_Section(mark=f"<{word}>", rest="\n", closing=f"</{word}>") for word in words]
    return CallTags(calls=(call,), sections=sections, excluded=(f"<{prefix}invoke name=",))


_ENDS_LINE = ("", "\n")
_DEEPSEEK_V3 = _CallTag(
    begin=f"{deepseek.CALL}function{deepseek.SEPARATOR}%s\n```json\n",
    ends=[f"\n```{deepseek.CALL_END}{end}" for end in _ENDS_LINE],
)
_DEEPSEEK_V3_1 = _CallTag(
    begin=f"{deepseek.CALL}%s{deepseek.SEPARATOR}", ends=[deepseek.CALL_END + end for end in _ENDS_LINE]
)
_KIMI = _CallTag(
    begin=f"{kimi.CALL}functions.%s:",
    between=({"type": "regex", "pattern": "[0-9]{1,6}"}, {"type": "const_string", "value": kimi.ARGUMENTS}),
    ends=(kimi.CALL_END,),
)

CALL_TAGS: Mapping[str, CallTags] = {
    "deepseek_v3": CallTags(
        calls=(_DEEPSEEK_V3, _DEEPSEEK_V3_1),
        sections=(_Section(mark=deepseek.SECTION, closing=deepseek.SECTION_END),),
        excluded=(deepseek.CALL,),
    ),
    "deepseek_v3_2": _invoke("｜DSML｜", "deepseek_xml", "｜DSML｜function_calls", "｜DSML｜tool_calls"),
    "glm45": CallTags(
        calls=(_CallTag(begin="<tool_call>%s", ends=("</tool_call>",), style="glm_xml"),), marks=("<tool_call>",)
    ),
    "granite": _json_list(("<|tool_call|>", "[", ""), ("<tool_call>", "[", "")),
    "granite_20b_fc": CallTags(calls=(_json_call("<function_call> "),), marks=("<function_call>",)),
    "hermes": CallTags(calls=(_json_call("<tool_call>\n", "\n</tool_call>"),), marks=("<tool_call>",)),
    "jamba": _json_list(("<tool_calls>", "[", "</tool_calls>")),
    "kimi_k2": CallTags(
        calls=(_KIMI,),
        sections=(_Section(mark=kimi.SECTION, closing=kimi.SECTION_END),),
        excluded=(kimi.CALL,),
    ),
    # Any object in the text may be a call, by whichever of its keys comes first; no object is one without its arguments.
    "llama3_json": CallTags(
        calls=[
            _CallTag(begin=f'{{{head}"name": "%s", "parameters": ', ends=("}",)) for head in ("", '"type": "function", ')
        ],
        marks=('{"name"', '{"type": "function"'),
        excluded=('"parameters"', '"arguments"'),
    ),
    "minimax_m2": _invoke("", "minimax_xml", "minimax:tool_call"),
    "nemotron": _json_list(("<TOOLCALL>", "[", "</TOOLCALL>")),
    # Text may well speak of functools.
    "phi4": _json_list(
        ("functools[", "", ""), ("<|tool_call|>", "[", "<|/tool_call|>"), excluded=("functools{",)
    ),
    "qwen3_coder": CallTags(
        calls=(
            _CallTag(begin="<tool_call>\n<function=%s>\n", ends=("</function>\n</tool_call>",), style="qwen_xml"),
        ),
        marks=("<tool_call>",),
        excluded=("<function=",),
    ),
}  # fmt: skip
