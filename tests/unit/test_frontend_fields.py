"""Parsing of request bodies: the path and the code of every error, and the single declaration of sampling parameters."""

from dataclasses import fields
from typing import Annotated, Any, Literal

import pytest

from kvmesh.api.types.v1 import sampling_pb2 as pb
from kvmesh.core import SamplingParams
from kvmesh.core.sampling import RANGES
from kvmesh.errors import InvalidRequestError, MeshError, UnsupportedError
from services.frontend.api.openai.chat_request import ChatRequest
from services.frontend.api.openai.sampling import CommonSampling, SamplingFields, sampling_params
from services.frontend.api.request_body import Body, FieldError, RefusingBody, read_body, refused


class Text(Body, kw_only=True, tag_field="type", tag="text"):
    text: str


class Other(RefusingBody, kw_only=True, tag_field="type", tag="other"):
    name: Literal["a", "b"] | None = None
    sealed: Annotated[Any, refused("nobody can open it", "", [])] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "b":
            raise FieldError("name", "must not be b here")


class Whole(Body, kw_only=True):
    content: list[Text | Other]
    counts: dict[int, float] | None = None
    words: list[str] | None = None
    inner: Other | None = None


GOOD: dict[str, Any] = {"content": [{"type": "text", "text": "x"}]}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"content": None}, "content", "invalid_value"),
    ({"content": [1]}, "content[0]", "invalid_value"),
    ({"content": [{}]}, "content[0].type", "invalid_value"),
    ({"content": [{"type": "image"}]}, "content[0].type", "unsupported"),
    ({"content": [{"type": "text"}]}, "content[0].text", "invalid_value"),
    ({"content": [{"type": "text", "text": "x", "mood": 1}]}, "content[0].mood", "unknown_field"),
    ({"content": [{"type": "other", "name": "c"}]}, "content[0].name", "invalid_value"),
    ({"content": [{"type": "other", "name": "b"}]}, "content[0].name", "invalid_value"),
    ({"content": [{"type": "other", "sealed": "x"}]}, "content[0].sealed", "unsupported"),
    ({"inner": {"sealed": [1]}}, "inner.sealed", "unsupported"),
    ({"words": ["x", 1]}, "words", "invalid_value"),
    ({"words": "x"}, "words", "invalid_value"),
    ({"counts": {"x": 1}}, "counts", "invalid_value"),
    ({"counts": {"5": "x"}}, "counts", "invalid_value"),
    ({"mood": 1}, "mood", "unknown_field"),
    ({"x" * 500: 1}, "x" * 128, "unknown_field"),
]


@pytest.mark.parametrize("prefix", ["", "parameters."])
def test_errors_name_the_field(prefix: str) -> None:
    """Errors have the whole path of the field, also in the message. The message stays short if the client sends long values."""
    for change, field, code in WRONG:
        with pytest.raises(MeshError) as caught:
            read_body(Whole, {**GOOD, **change}, prefix)
        error = caught.value
        assert isinstance(error, UnsupportedError if code == "unsupported" else InvalidRequestError)
        assert (error.field, error.reason) == ((prefix + field)[:128], code), change
        assert error.field in error.message and len(error.message) < 500
    with pytest.raises(InvalidRequestError) as caught:
        read_body(Whole, {"content": [], "words": {"x": "y" * 5000}}, prefix)
    with pytest.raises(InvalidRequestError) as caught:
        read_body(Whole, {**GOOD, "inner": {"type": "other", "name": "n" * 5000}}, prefix)
    assert len(caught.value.message) < 500


def test_null_and_neutral_values_are_accepted() -> None:
    """Null and neutral values count as absent, because OpenAI's clients send them for fields that they do not use."""
    body = read_body(Whole, {**GOOD, "counts": None, "inner": {"sealed": "", "name": None}})
    assert body.counts is None and body.inner is not None
    for value in (None, "", []):
        read_body(Whole, {**GOOD, "inner": {"sealed": value}})
    for value in (0, False, "x", {}):
        with pytest.raises(UnsupportedError):
            read_body(Whole, {**GOOD, "inner": {"sealed": value}})


def test_every_sampling_parameter_has_a_field_on_the_wire_and_in_the_apis() -> None:
    """Parameters of SamplingParams cannot be missing elsewhere, because the codec and the parsers use their names."""
    names = {each.name for each in fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert RANGES.keys() <= names
    # The parser builds the others from several fields.
    passed = {"logprobs", "prompt_logprobs", "constraint"}
    assert names - passed <= set(SamplingFields.__struct_fields__)


def test_fields_become_sampling_parameters() -> None:
    """Fields are copied by name. Arguments of the parser take precedence, and values are converted to the mesh's types."""
    values = {
        "temperature": 1,
        "top_k": -1,
        "stop": "end",
        "logit_bias": {"5": 1},
        "stop_token_ids": [7],
        "max_tokens": 3,
    }
    body = read_body(SamplingFields, values)
    assert sampling_params(body, max_tokens=9) == SamplingParams(
        temperature=1.0, top_k=0, stop=("end",), logit_bias=((5, 1.0),), stop_token_ids=(7,), max_tokens=9
    )
    assert sampling_params(read_body(CommonSampling, {"stop": ["x", "y"], "user": "u"})) == SamplingParams(
        stop=("x", "y")
    )
    assert sampling_params(read_body(ChatRequest, {"messages": [{"role": "user", "content": ""}]})) == SamplingParams()
