"""Renders Hugging Face chat templates in a sandbox, with the helper functions that they expect."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jinja2

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, UnsupportedError
from kvmesh.event_log import event_logger
from services.frontend.pipeline.request import Conversation, Message
from services.frontend.text.message_style import CallStyle, ContentStyle, find_call_style, find_content_style
from services.frontend.text.sandbox import CHARACTERS_MAX, LimitedEnvironment

_log = event_logger(__name__)
PROBE_STEPS_MAX = 100_000
"""Step limit of one probe. Loading a model renders about thirty probes of a few short messages each."""


class ChatTemplate:
    """One model's template. `special_tokens` (bos_token, eos_token...) become variables of the template.

    Messages are converted to the shape that the template expects (see `message_style`). `tool_source`: the template for
    conversations with tools, if the model has a separate one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        clock: Clock,
        *,
        tool_source: str = "",
    ) -> None:
        self._environment = LimitedEnvironment()
        self._environment.add_filter("tojson", _to_json)
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: _local_time(clock).strftime(form)
        self._template = self._compiled(source)
        self._tool_template = self._compiled(tool_source) if tool_source else self._template
        self._special_tokens = dict(special_tokens)
        self._call_style = CallStyle()
        self._call_style = find_call_style(partial(self._probed, self._tool_template))
        self._content_style = self._content_style_of(self._template)
        self._tool_content_style = self._content_style_of(self._tool_template) if tool_source else self._content_style

    def _content_style_of(self, template: jinja2.Template) -> ContentStyle:
        return find_content_style(lambda messages: self._probed(template, self._call_style.apply(messages)))

    def _probed(self, template: jinja2.Template, messages: Sequence[Message]) -> str | None:
        try:
            return self._rendered(template, Conversation(messages=()), messages, steps_max=PROBE_STEPS_MAX)
        except Exception:  # noqa: BLE001 (foreign code; whether it fails is the result of the probe)
            return None

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            template = self._environment.from_string(source)
            # Jinja copies the globals into each context. From its own ChainMap that takes a fifth of the rendering time.
            template.globals = dict(template.globals)
            return template
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnsupportedError(
                f"the chat template does not parse: {error}", reason="chat_template_broken"
            ) from error

    def render(self, conversation: Conversation, *, field: str = "messages") -> str:
        """Renders the prompt, which ends inside the last message if the answer continues it.

        Raises InvalidRequestError if the template refuses the conversation, fails on it, or does not show that message.
        """
        template = self._tool_template if conversation.tools else self._template
        content = self._tool_content_style if conversation.tools else self._content_style
        messages = self._call_style.apply(content.apply(conversation.messages))
        try:
            prompt = self._rendered(template, conversation, messages)
        except jinja2.TemplateError as error:
            text = f"the chat template refused the conversation: {error}"
        except Exception as error:  # noqa: BLE001 (foreign code raises anything on unusual input; logged)
            _log.warning("template_failed", error=type(error).__name__)
            text = "the chat template cannot render this conversation"
        else:
            if not conversation.continues_final_message:
                return prompt
            if (cut := cut_after_final_message(prompt, conversation)) is not None:
                return cut
            raise InvalidRequestError(
                "the chat template does not show the last message's text, so it cannot be continued", field=field
            )
        raise InvalidRequestError(text[:500], field=field, reason="chat_template_refused")

    def _rendered(
        self,
        template: jinja2.Template,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        steps_max: int | None = None,
    ) -> str:
        """Renders the conversation with `messages` in place of its own."""
        self._environment.begin(steps_max)
        pieces: list[str] = []
        left = CHARACTERS_MAX
        context = template.new_context(
            {
                **self._special_tokens,
                **conversation.arguments,
                "messages": messages,
                "tools": list(conversation.tools) or None,
                "documents": list(conversation.documents) or None,
                "add_generation_prompt": conversation.adds_generation_prompt,
            }
        )
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    raise jinja2.TemplateError("the rendered prompt is too long")
        finally:
            # The context and the template's macros refer to each other; clearing saves a garbage collection of the cycle.
            context.vars.clear()
        return "".join(pieces)


def _to_json(  # noqa: PLR0917  # The signature of transformers' filter, which templates call.
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters; models were trained on prompts without such escapes.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _local_time(clock: Clock) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(clock.wall())


def cut_after_final_message(text: str, conversation: Conversation) -> str | None:
    """Cuts a rendered conversation after the text of its last message. None if the template does not show that text.

    Templates close each message with their own marks and may strip its text, so the search runs backwards.
    """
    content = conversation.messages[-1].get("content") or ""
    if not isinstance(content, str):
        content = content[-1]["text"]
    start = text.rfind(content.strip())
    if start < 0 or not content.strip():
        return None
    spaced = content.lstrip()
    kept = spaced if text.startswith(spaced, start) else spaced.rstrip()
    return text[: start + len(kept)]
