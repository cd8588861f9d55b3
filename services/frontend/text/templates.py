"""Chat templates as Hugging Face writes them, in a sandbox, with the helper functions they expect."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jinja2

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.telemetry import event_logger
from services.frontend.pipeline.request import Conversation, Message
from services.frontend.text.call_style import CallStyle, find_style
from services.frontend.text.message_style import ContentStyle, find_content_style
from services.frontend.text.sandbox import LimitedEnvironment, TemplateLimits

_log = event_logger(__name__)
PROBE_STEPS_MAX = 100_000
"""Of a rendering that finds out what the template wants: a few short messages, some thirty times when a model is loaded."""


class ChatTemplate:
    """One model's template. `special_tokens` (bos_token, eos_token...) are its variables.

    Earlier tool calls and contents are given the way the template wants them (see `call_style` and `message_style`).
    `tool_source`: the template for conversations with tools, where the model has one of its own for them.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        clock: Clock,
        *,
        tool_source: str = "",
        limits: TemplateLimits | None = None,
    ) -> None:
        self._limits = limits or TemplateLimits()
        self._environment = LimitedEnvironment(self._limits)
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: _local_time(clock).strftime(form)
        self._template = self._compiled(source)
        self._tool_template = self._compiled(tool_source) if tool_source else self._template
        self._special_tokens = dict(special_tokens)
        self._call_style = CallStyle()
        self._call_style = find_style(partial(self._probed, self._tool_template))
        self._content_style = self._content_style_of(self._template)
        self._tool_content_style = self._content_style_of(self._tool_template) if tool_source else self._content_style

    def _content_style_of(self, template: jinja2.Template) -> ContentStyle:
        return find_content_style(lambda messages: self._probed(template, self._call_style.apply(messages)))

    def _probed(self, template: jinja2.Template, messages: Sequence[Message]) -> str | None:
        try:
            return self._joined(template, self._variables(Conversation(messages=()), messages), PROBE_STEPS_MAX)
        except Exception:  # noqa: BLE001 (templates are foreign code; that one fails is what is asked here)
            return None

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            template = self._environment.from_string(source)
            # Jinja merges the globals into each rendering's names, which takes a fifth of it when they are its chain of maps.
            template.globals = dict(template.globals)
            return template
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnsupportedError(
                f"the chat template does not parse: {error}", reason="chat_template_broken"
            ) from error

    def render(self, conversation: Conversation, *, field: str) -> str:
        """The prompt. InvalidRequestError when the template refuses or cannot cope with the conversation."""
        template = self._tool_template if conversation.tools else self._template
        content = self._tool_content_style if conversation.tools else self._content_style
        messages = self._call_style.apply(content.apply(conversation.messages))
        try:
            return self._joined(template, self._variables(conversation, messages))
        except jinja2.TemplateError as error:
            text = f"the chat template refused the conversation: {error}"
        except Exception as error:  # noqa: BLE001 (templates are foreign code and fail in any way on odd input; logged)
            _log.warning("template_failed", error=type(error).__name__)
            text = "the chat template cannot render this conversation"
        raise InvalidRequestError(text[:500], field=field, reason="chat_template_refused")

    def _variables(self, conversation: Conversation, messages: Sequence[Message]) -> dict[str, Any]:
        return {
            **self._special_tokens,
            **conversation.arguments,
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": list(conversation.documents) or None,
            "add_generation_prompt": conversation.adds_generation_prompt,
        }

    def _joined(self, template: jinja2.Template, variables: Mapping[str, Any], steps_max: int | None = None) -> str:
        self._environment.begin(steps_max)
        pieces: list[str] = []
        left = self._limits.characters_max
        context = template.new_context(dict(variables))
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    raise jinja2.TemplateError("the prompt grows too long")
        finally:
            # A template's macros hold the context and it holds them: a circle that only the collector would take apart.
            context.vars.clear()
        return "".join(pieces)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _local_time(clock: Clock) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(clock.wall())
