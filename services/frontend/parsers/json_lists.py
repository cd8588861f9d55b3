"""Calls as JSON behind a mark: `[{"name": ..., "arguments": {...}}, ...]`, or one object. The families differ in marks alone."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Malformed, Reader, Steps
from services.frontend.parsers.json_call import BARE_SHAPE, HERMES_SHAPE, Shape, read_json_call
from services.frontend.parsers.readers import close_call


def _reader(opening: str, closing: str = "", shape: Shape = HERMES_SHAPE, *, is_closed: bool = True) -> Reader:
    """`is_closed`: the closing mark is left out at the end of an answer only. A mark that ends with a bracket is the list's
    or the object's own; what is no call behind it was just text."""

    def read(feed: Feed) -> Steps:
        if opening.endswith("{"):
            feed.at -= 1
            yield from read_json_call(feed, BARE_SHAPE)
            return
        yield from feed.skip_blanks()
        if opening.endswith("["):
            if (yield from feed.peek()) not in ("{", ""):
                raise Malformed("")
            yield from read_list(feed, shape)
        elif (yield from feed.has("[")):
            yield from read_list(feed, shape)
        else:
            yield from read_json_call(feed, shape)
        if closing and is_closed:
            yield from close_call(feed, closing, opening)
        elif closing:
            yield from feed.skip_blanks()
            if not (yield from feed.has(closing)):
                feed.reject("")

    return read


def read_list(feed: Feed, shape: Shape = HERMES_SHAPE) -> Steps:
    """From behind the bracket; an answer may well end behind a whole call. An empty list says that nothing is called."""
    yield from feed.skip_blanks()
    if (yield from feed.has("]")):
        feed.settle()
        return
    while True:
        yield from read_json_call(feed, shape)
        yield from feed.skip_blanks()
        if (yield from feed.has(",")):
            continue
        if (yield from feed.peek()) and not (yield from feed.is_at_mark()):
            yield from feed.expect("]")
        feed.settle()
        return


_JAMBA, _JAMBA_END = "<tool_calls>", "</tool_calls>"
JAMBA = ToolFamily(
    name="jamba",
    readers={_JAMBA: _reader(_JAMBA, _JAMBA_END)},
    closing_marks=(_JAMBA_END,),
    template_marks=(_JAMBA,),
)

_NEMOTRON, _NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"
NEMOTRON = ToolFamily(
    name="nemotron",
    readers={_NEMOTRON: _reader(_NEMOTRON, _NEMOTRON_END)},
    closing_marks=(_NEMOTRON_END,),
    template_marks=(_NEMOTRON,),
)

# Granite 3.0 to 3.3 ends the list with its bracket; its mark is a token, or plain text in quantised models.
_GRANITE, _GRANITE_TEXT, _GRANITE_END = "<|tool_call|>", "<tool_call>", "</tool_call>"
GRANITE = ToolFamily(
    name="granite",
    readers={
        _GRANITE: _reader(_GRANITE),
        _GRANITE_TEXT: _reader(_GRANITE_TEXT, _GRANITE_END, is_closed=False),
    },
    closing_marks=(_GRANITE_END,),
    hidden_marks=(_GRANITE,),
    template_marks=(_GRANITE,),
)

# Granite 20B for function calling: one object behind each mark.
_GRANITE_20B = "<function_call>"
GRANITE_20B = ToolFamily(
    name="granite_20b_fc", readers={_GRANITE_20B: _reader(_GRANITE_20B)}, template_marks=(_GRANITE_20B,)
)

# Phi 4 mini says `functools[...]` where the template asks for it; by itself it has tokens for that.
_PHI_WORD, _PHI_OBJECT, _PHI, _PHI_END = "functools[", "functools{", "<|tool_call|>", "<|/tool_call|>"
PHI4 = ToolFamily(
    name="phi4",
    readers={
        _PHI_WORD: _reader(_PHI_WORD),
        _PHI_OBJECT: _reader(_PHI_OBJECT),
        _PHI: _reader(_PHI, _PHI_END, is_closed=False),
    },
    closing_marks=(_PHI_END,),
    hidden_marks=(_PHI, _PHI_END),
    template_marks=("functools", _PHI_END, "<|/tool|>"),
)

# Cohere Command R7B, A and later. Their special tokens around the answer are left out; the reasoning's are its family's.
COMMAND_ANSWER_MARKS = tuple(f"<|{word}_{part}|>" for part in ("RESPONSE", "TEXT") for word in ("START", "END"))
_COMMAND, _COMMAND_END = "<|START_ACTION|>", "<|END_ACTION|>"
_COMMAND_SHAPE = Shape(names=("tool_name", "name"), arguments=("parameters", "arguments"))
COHERE_COMMAND = ToolFamily(
    name="cohere_command",
    readers={_COMMAND: _reader(_COMMAND, _COMMAND_END, _COMMAND_SHAPE)},
    closing_marks=(_COMMAND_END, *COMMAND_ANSWER_MARKS),
    hidden_marks=(_COMMAND, _COMMAND_END, *COMMAND_ANSWER_MARKS),
    template_marks=(_COMMAND,),
)

# InternLM 2 and 3: one object, behind two tokens.
_INTERNLM, _INTERNLM_END = "<|action_start|><|plugin|>", "<|action_end|>"
INTERNLM = ToolFamily(
    name="internlm",
    readers={_INTERNLM: _reader(_INTERNLM, _INTERNLM_END)},
    closing_marks=(_INTERNLM_END,),
    mark_tokens=("<|action_start|>", "<|plugin|>"),
    hidden_marks=(_INTERNLM, _INTERNLM_END),
    template_marks=(_INTERNLM, "<|action_start|>"),
)

# GigaChat 3: one object, behind a token or, in the earlier format, behind a role.
_GIGACHAT, _GIGACHAT_ROLE, _GIGACHAT_END = "<|function_call|>", "function call<|role_sep|>\n", "<|message_sep|>"
GIGACHAT3 = ToolFamily(
    name="gigachat3",
    readers={
        _GIGACHAT: _reader(_GIGACHAT, _GIGACHAT_END, is_closed=False),
        _GIGACHAT_ROLE: _reader(_GIGACHAT_ROLE, _GIGACHAT_END, is_closed=False),
    },
    closing_marks=(_GIGACHAT_END,),
    mark_tokens=("<|role_sep|>",),
    hidden_marks=(_GIGACHAT, _GIGACHAT_ROLE, _GIGACHAT_END),
    template_marks=(_GIGACHAT, "function call<|role_sep|>"),
)
