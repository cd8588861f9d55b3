"""What clients of vLLM's server use beyond OpenAI's API. The assertions follow vLLM's own API tests."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvmesh.core import Generation, TokenLogprob
from services.frontend.models import ServedModel
from services.frontend.settings import HttpSettings
from tests.frontend_mesh import EOS, FakeMesh, served_model, tokens_of, write_model
from tests.integration.test_frontend_http import CHAT, COMPLETIONS, MESSAGES, Running, content, frontend

TEXT = "The sea 日本 is <|im_start|>deep."
FEATURES = frozenset({"logprobs", "prompt_logprobs"})


class OtherBestMesh(FakeMesh):
    """A mesh that samples tokens that are never among the best alternatives."""

    def _logprobs(self, generation: Generation, tokens: Any) -> list[TokenLogprob] | None:
        count = generation.sampling.logprobs
        if count is None:
            return None
        pairs = tuple((300 + k, -0.1 - k) for k in range(count))
        return [TokenLogprob(logprob=-7.5, alternatives=pairs) for _ in tokens]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = write_model(tmp_path_factory.mktemp("model"))
    return served_model(directory, features=FEATURES, adapters=("tiny-lora",), source="org/tiny")


@pytest.fixture
async def running(model: ServedModel) -> AsyncIterator[Running]:
    tokens = tokens_of(model.text, TEXT)
    async with frontend([model], OtherBestMesh(answer=lambda _: tokens)) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def whole_and_streamed(running: Running, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a completion's text, finish reason, token ids and log-probabilities, from a whole answer and from a stream."""
    _, answer, _ = await running.post(COMPLETIONS, body)
    whole = answer["choices"][0]
    streamed: dict[str, Any] = {"text": "", "logprobs": {}, "token_ids": []}
    for event in (await running.events(COMPLETIONS, body))[:-1]:
        for choice in event["choices"]:
            streamed["text"] += choice["text"]
            streamed["token_ids"] += choice.get("token_ids") or []
            for name, values in (choice["logprobs"] or {}).items():
                streamed["logprobs"].setdefault(name, []).extend(values)
    return whole, streamed


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_the_sampled_token_is_among_its_alternatives(running: Running, count: int) -> None:
    """Also if it is not one of the best. Streams have the same log-probabilities as whole answers."""
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 60, "logprobs": count}
    whole, streamed = await whole_and_streamed(running, body)
    found = whole["logprobs"]
    for token, own, tops in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert tops[token] == own == -7.5
        assert count <= len(tops) <= count + 1 or token in ("\N{REPLACEMENT CHARACTER}",)
    assert streamed["logprobs"] == found


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("is_text", [True, False])
async def test_offsets_are_positions_in_the_text(running: Running, skips: bool, is_text: bool) -> None:
    """The offsets are right for an echoed prompt and for the answer, with special tokens in both, shown and hidden."""
    text = running.pipeline.models.find("tiny").text
    prompt = f"{EOS}Hello<|im_start|> 日本"
    ids = list(text.tokenise(prompt, adds_special_tokens=False))
    body = {
        "model": "tiny", "prompt": prompt if is_text else ids, "max_tokens": 60, "logprobs": 1, "echo": True,
        "skip_special_tokens": skips, "return_token_ids": True,
    }  # fmt: skip
    whole, streamed = await whole_and_streamed(running, body)
    echo = prompt if is_text or not skips else "Hello 日本"
    assert whole["text"] == echo + (TEXT.replace("<|im_start|>", "") if skips else TEXT)
    found = whole["logprobs"]
    for token, offset in zip(found["tokens"][:-1], found["text_offset"], strict=False):
        shown = whole["text"][offset : offset + len(token)]
        is_hidden = skips and token.startswith("<|") and (offset >= len(echo) or not is_text)
        assert is_hidden or "\N{REPLACEMENT CHARACTER}" in token or shown == token, (token, shown)
        assert not is_hidden or shown != token
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][-1] == len(whole["text"])
    assert whole["token_ids"] == tokens_of(text, TEXT) and whole["prompt_token_ids"] == ids
    assert len(found["tokens"]) == len(ids) + len(whole["token_ids"])
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert (streamed["text"], streamed["logprobs"]) == (whole["text"], found)
    assert streamed["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("more", [{}, {"stop": ["deep"]}, {"stop_token_ids": [290], "ignore_eos": True}])
async def test_all_tokens_that_usage_counts_are_listed(running: Running, path: str, more: dict[str, Any]) -> None:
    """The token ids and log-probabilities include the token that ended the answer and those of a stop string, whose text is not shown."""
    asks: dict[str, Any] = {"messages": MESSAGES, "logprobs": True} if path == CHAT else {"prompt": "x", "logprobs": 1}
    body = {"model": "tiny", "max_tokens": 60, "return_token_ids": True, **asks, **more}
    _, whole, _ = await running.post(path, body)
    choice, count = whole["choices"][0], whole["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == count
    events = await running.events(path, {**body, "stream_options": {"include_usage": True}})
    assert events[-2]["usage"]["completion_tokens"] == count
    choices = [each for event in events[:-1] for each in event["choices"]]
    assert [i for each in choices for i in each.get("token_ids") or []] == choice["token_ids"]
    name = "content" if path == CHAT else "tokens"
    listed = [entry for each in choices for entry in (each["logprobs"] or {}).get(name, [])]
    assert listed == choice["logprobs"][name] and len(listed) == count
    shown_text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert content(events) == shown_text
    assert "deep" not in shown_text if "stop" in more else EOS not in shown_text


async def test_tokens_named_by_id(running: Running, client: openai.AsyncOpenAI) -> None:
    """With `return_tokens_as_token_ids` log-probabilities name tokens by id, and the names match the lists of token ids."""
    asks = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    completion = await client.completions.create(
        model="tiny", prompt="Hello", max_tokens=20, echo=True, logprobs=1, extra_body={**asks, "prompt_logprobs": 1}
    )
    choice: Any = completion.choices[0]
    named = [int(each.removeprefix("token_id:")) for each in choice.logprobs.tokens]
    assert named == [*choice.prompt_token_ids, *choice.token_ids]
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
    assert all(each.startswith("token_id:") for tops in choice.logprobs.top_logprobs[1:] for each in tops)
    ids, listed = [], []
    async for chunk in await client.completions.create(
        model="tiny", prompt="Hello", max_tokens=20, stream=True, logprobs=1, extra_body=asks
    ):
        part: Any = chunk.choices[0]
        ids += part.token_ids
        listed += [int(each.removeprefix("token_id:")) for each in part.logprobs.tokens]
    assert ids == listed and ids
    chat = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body=asks
    )
    chosen: Any = chat.choices[0]
    assert [int(each.token.removeprefix("token_id:")) for each in chosen.logprobs.content] == chosen.token_ids
    assert chosen.logprobs.content[0].top_logprobs[0].token == "token_id:300"


async def test_prompt_logprobs_are_null_by_default(client: openai.AsyncOpenAI) -> None:
    """vLLM's clients read `prompt_logprobs` of every whole answer."""
    completion: Any = await client.completions.create(model="tiny", prompt="x", max_tokens=5)
    assert completion.choices[0].prompt_logprobs is None
    chat: Any = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert chat.prompt_logprobs is None


async def test_models_have_root_and_parent(client: openai.AsyncOpenAI) -> None:
    """The list of models has root, parent and context length, for the model and its adapter."""
    listed: list[Any] = [each async for each in client.models.list()]
    assert [(each.id, each.root, each.parent) for each in listed] == [
        ("tiny", "org/tiny", None),
        ("tiny-lora", "tiny-lora", "tiny"),
    ]
    assert {each.max_model_len for each in listed} == {512}


async def test_token_strings_are_the_vocabularys(running: Running) -> None:
    """The strings are those of `convert_ids_to_tokens`, special tokens included."""
    status, found, _ = await running.post(
        "/tokenize", {"model": "tiny", "prompt": f"Hello the sea{EOS}", "return_token_strs": True}
    )
    text = running.pipeline.models.find("tiny").text
    assert status == 200 and found["token_strs"] == [text.vocabulary_token(each) for each in found["tokens"]]
    assert "".join(found["token_strs"]) == f"HelloĠtheĠsea{EOS}"
    _, found, _ = await running.post("/tokenize", {"model": "tiny", "prompt": "Hello"})
    assert found["token_strs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/v1/embeddings"])
async def test_a_request_need_not_name_the_only_model(running: Running, path: str, model: ServedModel) -> None:
    """A request without a model uses the only one. If two are served, or the setting requires it, the field is mandatory."""
    asks: dict[str, Any] = {CHAT: {"messages": MESSAGES}, "/v1/embeddings": {"input": "x"}}.get(path, {"prompt": "x"})
    _, found, _ = await running.post(path, asks)
    if "error" in found:  # This mesh does not support embeddings.
        assert found["error"]["code"] == "embeddings_unsupported"
    elif path != "/tokenize":
        assert found["model"] == "tiny"
    for models, http in (([model, other_model(model)], None), ([model], HttpSettings(model_is_optional=False))):
        async with frontend(models, FakeMesh(answer=lambda _: [2]), http=http) as strict:
            status, found, _ = await strict.post(path, asks)
            assert (status, found["error"]["param"]) == (400, "model"), json.dumps(found)


def other_model(model: ServedModel) -> ServedModel:
    return ServedModel(**{**{name: getattr(model, name) for name in model.__slots__}, "name": "other", "adapters": ()})
