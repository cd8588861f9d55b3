"""The chat template as transformers and vLLM run it, without importing either."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent


def _raise_exception(text: str) -> None:
    raise TemplateError(text)


def _tojson(value: object, indent: int | None = None) -> str:
    """JSON with the keys in their given order and without HTML escapes, which Jinja's own filter would add."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def load_template(path: Path = HERE / "chat_template.jinja") -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(path.read_text(encoding="utf-8"))


def render(
    template: Template,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    generate: bool = False,
) -> str:
    """`generate` appends the head of the assistant's answer."""
    return template.render(messages=messages, tools=tools or None, add_generation_prompt=generate)
