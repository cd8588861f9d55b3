"""Compares chat templates with Hugging Face's own renderer, and tests the limits on untrusted templates."""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.pipeline.request import Conversation
from services.frontend.text import sandbox, templates
from services.frontend.text.templates import ChatTemplate, cut_after_final_message
from services.frontend.text.text_model import load_text_model
from tests.frontend_mesh import write_model

DIRECTORY = Path(__file__).parent / "templates"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": 1}},
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi <b>there</b> & 'you' \"two\"\n\n"}],
    [
        {"role": "user", "content": "日本 🙂"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nÇa va"},
        {"role": "user", "content": "  and?  "},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "It says so."},
        {"role": "user", "content": "Thanks"},
    ],
    [
        {"role": "user", "content": "Both"},
        {"role": "assistant", "content": "Wait", "tool_calls": [CALL, CALL | {"id": "123456789"}]},
        {"role": "tool", "content": '{"a": 1}', "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "rain", "tool_call_id": "123456789"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "twice"}],
]
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "<w> é", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
DOCUMENTS = [{"title": "One", "text": "some\ntext " * 5}, {"text": "more"}]
ARGUMENTS: list[dict[str, Any]] = [{}, {"enable_thinking": False, "effort": "high", "date_string": "now"}]


def sources() -> dict[str, str]:
    """Returns our own templates, the demo model's, and those of installed packages."""
    paths = [*DIRECTORY.glob("*.jinja"), Path(__file__).parents[2] / "models" / "demo" / "chat_template.jinja"]
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:
        paths += sorted((Path(spec.origin).parent / "transformers_utils" / "chat_templates").glob("*.jinja"))
    return {path.parent.name + "/" + path.stem: path.read_text(encoding="utf-8") for path in paths}


SOURCES = sources()


class Oracle:
    """A process that renders with transformers."""

    def __init__(self) -> None:
        script = str(Path(__file__).parent / "template_oracle.py")
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def render(self, case: dict[str, Any]) -> str | None:
        """Returns the text that transformers renders. None: the template raised an error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        text: str | None = json.loads(self._process.stdout.readline())
        return text

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    oracle = Oracle()
    yield oracle
    oracle.close()


def ours(case: dict[str, Any]) -> str | None:
    template = ChatTemplate(case["source"], case["special_tokens"], SystemClock())
    conversation = Conversation(
        messages=case["messages"],
        tools=case["tools"] or (),
        documents=case["documents"] or (),
        arguments=case["arguments"],
        adds_generation_prompt=case["add_generation_prompt"],
    )
    try:
        return template.render(conversation, field="messages")
    except InvalidRequestError:
        return None


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_as_hugging_face_renders(oracle: Oracle, name: str) -> None:
    """Our renderer returns the same text, including whitespace, and refuses the same conversations."""
    rendered = 0
    if name in TAKES_NOTHING_ELSE:
        pytest.skip("the template shows only content in parts")
    for messages, tools, documents, arguments, adds in itertools.product(
        CONVERSATIONS, (None, TOOLS), (None, DOCUMENTS), ARGUMENTS, (True, False)
    ):
        case = {
            "source": SOURCES[name],
            "special_tokens": SPECIAL_TOKENS,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "arguments": arguments,
            "add_generation_prompt": adds,
        }
        text = ours(case)
        assert text == oracle.render(case), (messages, tools, documents, arguments, adds)
        rendered += text is not None
    assert rendered, "the template refused every conversation, so nothing was compared"


PARTS = [{"type": "text", "text": " One. "}, {"type": "text", "text": "Two\nthree."}]
OTHER_CONTENTS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": PARTS}],
    [{"role": "user", "content": PARTS[:1]}],
    [{"role": "system", "content": PARTS}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PARTS}, {"role": "user", "content": PARTS}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": PARTS, "tool_call_id": "abcdefghi", "name": "get_weather"},
        {"role": "user", "content": PARTS},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": PARTS, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get_weather"},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, {"role": "user", "content": "y"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "abcdefghi", "name": "get_weather"},
    ],
]
EACH = {"user", "system", "developer", "assistant", "tool"}
# The roles whose parts each template shows one by one, found by reading the templates. The second template loops over system parts too, but
# shows only the first one.
TAKES_PARTS = {
    "demo/chat_template": EACH,
    "templates/parts_macro": EACH - {"developer"},
    "templates/parts_loop": EACH - {"system"},
    "templates/parts_only": EACH,
}
TAKES_NOTHING_ELSE = {"templates/parts_only"}
# Templates that show nothing for a content of None, in messages with calls and in others. The rest print None or fail.
TAKES_NONE = {
    (name, has_calls)
    for name in ("demo/chat_template", "templates/parts_macro", "templates/parts_only", "templates/none_content",
                 "chat_templates/template_kimi_audio")
    for has_calls in (True, False)
} | {("templates/headers", True), ("templates/instructions", True)}  # fmt: skip


def as_taken(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its content in the form that the template supports."""
    content = message["content"]
    if content is None and (name, "tool_calls" in message) not in TAKES_NONE:
        content = ""
    elif isinstance(content, list) and message["role"] not in TAKES_PARTS.get(name, ()):
        content = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and name in TAKES_NOTHING_ELSE:
        content = [{"type": "text", "text": content}]
    return {**message, "content": content}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_contents_have_the_form_that_the_template_supports(oracle: Oracle, name: str) -> None:
    """Templates that show parts get parts, others get one text. None and an empty text stay as the client sent them."""
    for messages, tools in itertools.product([*CONVERSATIONS, *OTHER_CONTENTS], (None, TOOLS)):
        case = {
            "source": SOURCES[name],
            "special_tokens": SPECIAL_TOKENS,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "arguments": {},
            "add_generation_prompt": True,
        }
        wanted = oracle.render(case | {"messages": [as_taken(name, message) for message in messages]})
        assert ours(case) == wanted, messages
        assert wanted is None or "'text'" not in wanted


@pytest.mark.parametrize("name", ["chatml_tools", "headers", "instructions", "demo"])
@pytest.mark.parametrize("final_text", ["It is", "It is ", "a", "Hi", "user", "日本 🙂", "two\nlines\n"])
def test_a_continued_message_ends_where_hugging_face_ends_it(oracle: Oracle, name: str, final_text: str) -> None:
    """Also if the text occurs elsewhere in the prompt, or ends with whitespace that the template strips."""
    source = next(text for key, text in SOURCES.items() if name in key)
    messages = [{"role": "user", "content": "Hi a"}, {"role": "assistant", "content": final_text}]
    case = {
        "source": source,
        "special_tokens": SPECIAL_TOKENS,
        "messages": messages,
        "tools": None,
        "documents": None,
        "arguments": {},
        "add_generation_prompt": False,
    }
    text = ours(case)
    assert text is not None
    conversation = Conversation(messages=messages, continues_final_message=True)
    assert cut_after_final_message(text, conversation) == oracle.render(case | {"continue_final_message": True})


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' if messages[0].role }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_exhaust_resources_or_escape(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless loops, unbounded growth, recursion, mutations and access to the process are refused, and the error names the field.

    Without the limits most of them would take hours or all memory, and pytest's timeout would end them.
    """
    monkeypatch.setattr(sandbox, "STEPS_MAX", 200_000)
    for module in (sandbox, templates):
        monkeypatch.setattr(module, "CHARACTERS_MAX", 1_000_000)
    conversation = Conversation(messages=[{"role": "user", "content": "x" * 100}])
    # Jinja's sandbox renders names that begin with underscores as empty.
    assert outcome(source, conversation) in ("", "None", "messages", "chat_template_broken")


def outcome(source: str, conversation: Conversation) -> str:
    """Returns the text, or the field of the error, or its reason if the template itself is broken."""
    try:
        return ChatTemplate(source, {}, SystemClock()).render(conversation, field="messages").strip()
    except (InvalidRequestError, UnsupportedError) as error:
        return error.field or error.reason


@pytest.mark.parametrize(
    "call",
    [
        "{{ tool['function']['name'] ~ ' ' ~ tool['function']['arguments']|tojson }}",
        "{{ tool['function']['name'] + ' ' + tool['function']['arguments'] }}",
    ],
)
@pytest.mark.parametrize("test", ["true", "message['content'] is none", "message.content == ''"])
def test_earlier_calls_have_the_form_that_the_template_supports(call: str, test: str) -> None:
    """Templates get the arguments of calls as an object or as text, and missing content as none or as an empty text."""
    source = (
        "{% for message in messages %}{% for tool in message.tool_calls or [] %}{% if " + test + " %}" + call +
        "{% endif %}{% endfor %}{% endfor %}"
    )  # fmt: skip
    template = ChatTemplate(source, {}, SystemClock())
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    text = template.render(Conversation(messages=messages), field="messages")
    assert text == 'get_weather {"city": "Zürich", "n": 1}'


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    """Like Hugging Face, uses the template named tool_use if there are tools. Files take precedence over the configuration."""
    directory = write_model(tmp_path)
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ image_token }}"}]
    config = {"chat_template": named, "extra_special_tokens": {"image_token": "<image>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_text_model(directory, SystemClock())
    assert text.template.render(Conversation(messages=[])) == "plain"
    assert text.template.render(Conversation(messages=[], tools=TOOLS)) == "tools <image>"
    extra = directory / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("from a file")
    text = load_text_model(directory, SystemClock())
    assert text.template.render(Conversation(messages=[], tools=TOOLS)) == "from a file"
