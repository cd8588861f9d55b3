"""Formats of calls as structural tags (xgrammar's format, which vLLM and SGLang compile): free text, and calls with valid arguments.

The tags describe the format of a family's template, not all that its reader accepts. They exclude marks that the reader accepts
without a section from free text, so that no call bypasses its schema. Families without an entry write arguments in ways
that xgrammar has no style for (pythonic, gemma), or with tokens that not every tokenizer spells as text (harmony, mistral).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.parsers import deepseek, kimi

Schema = Mapping[str, Any]
Format = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallTag:
    """A spelling of one call. `begin`: contains `%s` for the name. `ends`: the alternatives. `style`: xgrammar's name for the format
    of arguments. `between`: formats between `begin` and the arguments.
    """

    begin: str
    ends: Sequence[str]
    style: str = "json"
    between: Sequence[Format] = ()

    def tag(self, name: str, schema: Schema) -> Format:
        """Returns the tag for a function. `schema`: that of its arguments."""
        content: Format = {"type": "json_schema", "json_schema": schema, "style": self.style}
        if self.between:
            content = {"type": "sequence", "elements": [*self.between, content]}
        return {"type": "tag", "begin": self.begin.replace("%s", name), "content": content, "end": [*self.ends]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """The text around and between calls. A section begins with `mark`, which occurs nowhere else, and `rest`."""

    mark: str
    rest: str = ""
    separator: str = ""
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """The format of a family's calls. `marks`: begin calls without a section. `excluded`: texts that free text may not contain."""

    calls: Sequence[_CallTag]
    marks: Sequence[str] = ()
    sections: Sequence[_Section] = ()
    excluded: Sequence[str] = ()

    def document(self, tools: Iterable[tuple[str, Schema]], *, is_parallel: bool) -> Format:
        """Returns the structural tag for functions, given as name and schema of the arguments."""
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


def _json_call(before: str = "", after: str = "") -> _CallTag:
    return _CallTag(begin=f'{before}{{"name": "%s", "arguments": ', ends=(f"}}{after}",))


def _json_list(*marks: tuple[str, str, str], excluded: Sequence[str] = ()) -> CallTags:
    """`marks`: mark and rest of each section, and the text after the list's bracket."""
    sections = [_Section(mark=mark, rest=rest, separator=", ", closing=f"]{end}") for mark, rest, end in marks]
    return CallTags(calls=(_json_call(),), sections=sections, excluded=excluded)


def _invoke(prefix: str, style: str, *words: str) -> CallTags:
    """`words`: alternative names of the section's tag."""
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
    "hermes": CallTags(calls=(_json_call(before="<tool_call>\n", after="\n</tool_call>"),), marks=("<tool_call>",)),
    "jamba": _json_list(("<tool_calls>", "[", "</tool_calls>")),
    "kimi_k2": CallTags(
        calls=(_KIMI,),
        sections=(_Section(mark=kimi.SECTION, closing=kimi.SECTION_END),),
        excluded=(kimi.CALL,),
    ),
    # Any object in the text may be a call, with either key first. Without arguments no object is a call.
    "llama3_json": CallTags(
        calls=[
            _CallTag(begin=f'{{{head}"name": "%s", "parameters": ', ends=("}",)) for head in ("", '"type": "function", ')
        ],
        marks=('{"name"', '{"type": "function"'),
        excluded=('"parameters"', '"arguments"'),
    ),
    "minimax_m2": _invoke("", "minimax_xml", "minimax:tool_call"),
    "nemotron": _json_list(("<TOOLCALL>", "[", "</TOOLCALL>")),
    # The word itself stays allowed in text.
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
