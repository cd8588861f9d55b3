"""A model's chat template cannot use unbounded memory or time."""

from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.pipeline.request import Conversation
from services.frontend.text import sandbox, templates
from services.frontend.text.templates import ChatTemplate
from tests.work import at_most_bytes, at_most_lines

HUGE = "3 * 10 ** 9"
ATTACKS = [
    f"{{{{ 'a'.ljust({HUGE}) }}}}",
    f"{{{{ 'a'.rjust({HUGE}) }}}}",
    f"{{{{ 'a'.center({HUGE}) }}}}",
    f"{{{{ 'a'.zfill({HUGE}) }}}}",
    f"{{{{ '\t'.expandtabs({HUGE}) }}}}",
    f"{{{{ (1).to_bytes({HUGE}, 'big') }}}}",
    "{% set a = 'a' * 900000 %}{{ a.replace('a', a) }}",
    "{% set a = 'a' * 900000 %}{{ a.replace('', a) }}",
    "{% set a = 'a' * 900000 %}{{ a.join([a] * 1000) }}",
    "{% set a = 'a' * 900000 %}{{ ([a] * 100000) | join }}",
    "{% set a = 'a' * 900000 %}{{ ([a] * 10) | join(a) }}",
    "{{ '{:>3000000000}'.format('a') }}",
    f"{{{{ '{{:{{w}}}}'.format('a', w={HUGE}) }}}}",
    f"{{{{ '{{:{{w}}}}'.format_map({{'w': {HUGE}}}) }}}}",
    "{{ '%3000000000d' % 1 }}",
    f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    f"{{{{ '%*d' | format({HUGE}, 1) }}}}",
    f"{{{{ 'a' | center({HUGE}) }}}}",
    f"{{{{ 'a' | indent({HUGE}, true) }}}}",
    f"{{{{ ['a'] | batch({HUGE}, 'x') | list }}}}",
    f"{{{{ ['a'] | slice({HUGE}) | list }}}}",
    f"{{{{ 1.5 | round({HUGE}, 'ceil') }}}}",
    f"{{{{ {{'a': 1}} | tojson(indent={HUGE}) }}}}",
    "{{ ([[1] * 1000] * 10000) | sum(start=[]) }}",
    "{% set a = 'a' * 900000 %}{% set b = a ~ a ~ a %}{{ b }}",
    "{% set a = 'a' * 900000 %}{% set b %}{% for i in range(1000) %}{{ a }}{% endfor %}{% endset %}{{ b | length }}",
    "{% macro m() %}{% for i in range(1000) %}{{ 'a' * 900000 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{{ lipsum(n=1000000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]
BYTES_MAX, LINES_MAX = 64 << 20, 2_000_000
"""Five times as much as the most expensive of these templates takes with the limits below."""


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limits, so that a failing test needs little time and memory."""
    monkeypatch.setattr(sandbox, "STEPS_MAX", 200_000)
    for module in (sandbox, templates):
        monkeypatch.setattr(module, "CHARACTERS_MAX", 1_000_000)


@pytest.mark.parametrize("source", ATTACKS)
def test_a_value_cannot_grow_without_bounds(source: str) -> None:
    """The template is refused before the value exists, and after a bounded number of steps."""
    with at_most_bytes(BYTES_MAX), at_most_lines(LINES_MAX), pytest.raises((InvalidRequestError, UnsupportedError)):
        rendered(source)


def rendered(source: str, **arguments: Any) -> str:
    template = ChatTemplate(source, {}, SystemClock())
    conversation = Conversation(messages=[{"role": "user", "content": "Hi"}], arguments=arguments)
    return template.render(conversation, field="messages")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a'.ljust(3) }}|{{ 'b'.zfill(2) }}", "a  |0b"),
        ("{{ ', '.join(['a', 'b']) }} {{ ['c', 1] | join('-') }}", "a, b c-1"),
        ("{{ [{'n': 'a'}, {'n': 'b'}] | join(' ', attribute='n') }}", "a b"),
        ("{{ [{'n': 'a'}] | map(attribute='n') | join }}{{ ', '.join(['x'] | map('upper')) }}", "aX"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'x' | replace('x', 'y') }}", "a+by"),
        ("{{ '%s is %d' % ('a', 3) }} {{ '%s' | format('b') }} {{ '{} {x:>3}'.format('c', x='d') }}", "a is 3 b c   d"),
        ("{{ 'a' ~ 1 ~ none }}{{ messages[0].content ~ '!' }}", "a1NoneHi!"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m('b') }}", "<a><b>"),
        ("{% set b %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ b | trim }}", "012"),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'x\ny' | indent(2) }} {{ [1, 2] | sum }} {{ 1.26 | round(1) }} {{ [1,2,3] | batch(2) | list }}", "x\n  y 3 1.3 [[1, 2], [3]]"),
    ],
)  # fmt: skip
def test_the_sandbox_preserves_the_output_of_templates(source: str, text: str) -> None:
    assert rendered(source) == text
