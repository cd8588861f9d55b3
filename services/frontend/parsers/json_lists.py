"""Calls as JSON after a mark: `[{"name": ..., "arguments": {...}}, ...]`, or one object. The families differ in marks only."""

from services.frontend.parsers.family import ToolFamily
from services.frontend.parsers.feed import Feed, Malformed, Reader, Steps
from services.frontend.parsers.json_call import BARE_SHAPE, HERMES_SHAPE, CallShape, read_json_call
from services.frontend.parsers.readers import close_call


def json_reader(opening: str, closing: str = "", shape: CallShape = HERMES_SHAPE, *, is_closed: bool = True) -> Reader:
    """Returns a reader of one call or a list of calls.

    `is_closed`: after the calls nothing but the closing mark may follow. An opening mark that ends with a bracket contains
    that of the list or of the object; other JSON after it is text.
    """

    def read(feed: Feed) -> Steps:
        if opening.endswith("{"):
            # The mark ends with the brace of the object.
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
            yield from close_call(feed, closing)
        elif closing:
            yield from feed.skip_blanks()
            if not (yield from feed.has(closing)):
                feed.reject("")

    return read


def read_list(feed: Feed, shape: CallShape = HERMES_SHAPE) -> Steps:
    """Reads a list from after its bracket. An empty list means that nothing is called. The closing bracket may be missing."""
    yield from feed.skip_blanks()
    if not (yield from feed.has("]")):
        while True:
            yield from read_json_call(feed, shape)
            yield from feed.skip_blanks()
            if not (yield from feed.has(",")):
                break
        if (yield from feed.peek()) and not (yield from feed.is_at_mark()):
            yield from feed.expect("]")
    feed.settle()


def _family(name: str, opening: str, closing: str) -> ToolFamily:
    return ToolFamily(
        name=name,
        readers={opening: json_reader(opening=opening, closing=closing)},
        closing_marks=(closing,),
        template_marks=(opening,),
    )


JAMBA = _family("jamba", opening="<tool_calls>", closing="</tool_calls>")
NEMOTRON = _family("nemotron", opening="<TOOLCALL>", closing="</TOOLCALL>")
# Hermes, Qwen 2.5, Qwen 3 and ERNIE 4.5.
HERMES = _family("hermes", opening="<tool_call>", closing="</tool_call>")
LONGCAT = _family("longcat", opening="<longcat_tool_call>", closing="</longcat_tool_call>")

# Granite 3.0 to 3.3 ends the list with its bracket; its mark is a token, or plain text in quantised models.
_GRANITE, _GRANITE_TEXT, _GRANITE_END = "<|tool_call|>", "<tool_call>", "</tool_call>"
GRANITE = ToolFamily(
    name="granite",
    readers={
        _GRANITE: json_reader(_GRANITE),
        _GRANITE_TEXT: json_reader(opening=_GRANITE_TEXT, closing=_GRANITE_END, is_closed=False),
    },
    closing_marks=(_GRANITE_END,),
    hidden_marks=(_GRANITE,),
    template_marks=(_GRANITE,),
)

# Granite 20B for function calling: one object after each mark.
_GRANITE_20B = "<function_call>"
GRANITE_20B = ToolFamily(
    name="granite_20b_fc", readers={_GRANITE_20B: json_reader(_GRANITE_20B)}, template_marks=(_GRANITE_20B,)
)

# Phi 4 mini writes `functools[...]` where the template asks for it; without that it uses its tokens.
_PHI_WORD, _PHI_OBJECT, _PHI, _PHI_END = "functools[", "functools{", "<|tool_call|>", "<|/tool_call|>"
PHI4 = ToolFamily(
    name="phi4",
    readers={
        _PHI_WORD: json_reader(_PHI_WORD),
        _PHI_OBJECT: json_reader(_PHI_OBJECT),
        _PHI: json_reader(opening=_PHI, closing=_PHI_END, is_closed=False),
    },
    closing_marks=(_PHI_END,),
    hidden_marks=(_PHI, _PHI_END),
    template_marks=("functools", _PHI_END, "<|/tool|>"),
)

# Cohere Command R7B, A and later. Their special tokens around the answer are dropped; those around reasoning belong to its family.
COMMAND_ANSWER_MARKS = tuple(f"<|{word}_{part}|>" for part in ("RESPONSE", "TEXT") for word in ("START", "END"))
_COMMAND, _COMMAND_END = "<|START_ACTION|>", "<|END_ACTION|>"
_COMMAND_SHAPE = CallShape(names=("tool_name", "name"), arguments=("parameters", "arguments"))
COHERE_COMMAND = ToolFamily(
    name="cohere_command",
    readers={_COMMAND: json_reader(opening=_COMMAND, closing=_COMMAND_END, shape=_COMMAND_SHAPE)},
    closing_marks=(_COMMAND_END, *COMMAND_ANSWER_MARKS),
    hidden_marks=(_COMMAND, _COMMAND_END, *COMMAND_ANSWER_MARKS),
    template_marks=(_COMMAND,),
)

# InternLM 2 and 3: one object, after two tokens.
_INTERNLM, _INTERNLM_END = "<|action_start|><|plugin|>", "<|action_end|>"
INTERNLM = ToolFamily(
    name="internlm",
    readers={_INTERNLM: json_reader(opening=_INTERNLM, closing=_INTERNLM_END)},
    closing_marks=(_INTERNLM_END,),
    mark_tokens=("<|action_start|>", "<|plugin|>"),
    hidden_marks=(_INTERNLM, _INTERNLM_END),
    template_marks=(_INTERNLM, "<|action_start|>"),
)

# GigaChat 3: one object, after a token or, in the earlier format, after a role.
_GIGACHAT, _GIGACHAT_ROLE, _GIGACHAT_END = "<|function_call|>", "function call<|role_sep|>\n", "<|message_sep|>"
GIGACHAT3 = ToolFamily(
    name="gigachat3",
    readers={
        mark: json_reader(opening=mark, closing=_GIGACHAT_END, is_closed=False) for mark in (_GIGACHAT, _GIGACHAT_ROLE)
    },
    closing_marks=(_GIGACHAT_END,),
    mark_tokens=("<|role_sep|>",),
    hidden_marks=(_GIGACHAT, _GIGACHAT_ROLE, _GIGACHAT_END),
    template_marks=(_GIGACHAT, "function call<|role_sep|>"),
)
