"""Chat templates as Hugging Face writes them, in a sandbox, with the helper functions they expect."""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.telemetry import event_logger
from services.frontend.request import Conversation

_log = event_logger(__name__)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model says; for rendering it is its content."""

    tags = {"generation"}  # noqa: RUF012 (the attribute's type is the base class's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call of `_pass`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One model's template. `special_tokens` (bos_token, eos_token...) are its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Clock) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: _local_time(clock).strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedError(
                f"the chat template does not parse: {error}", reason="chat_template_broken"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: Conversation, *, field: str) -> str:
        """The prompt. InvalidRequestError when the template refuses or cannot cope with the conversation."""
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": conversation.messages,
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.adds_generation_prompt,
        }
        try:
            return self._template.render({**conversation.arguments, **variables})
        except jinja2.TemplateError as error:
            text = f"the chat template refused the conversation: {error}"
        except Exception as error:  # noqa: BLE001 (templates are foreign code and fail in any way on odd input; logged)
            _log.warning("template_failed", error=type(error).__name__)
            text = "the chat template cannot render this conversation"
        raise InvalidRequestError(text[:500], field=field, reason="chat_template_refused")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _local_time(clock: Clock) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(clock.wall())
