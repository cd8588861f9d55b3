"""The OpenAPI document matches the routes, the request readers and the responses."""

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from services.frontend.api.openapi.document import REQUESTS, openapi_document
from services.frontend.models import ServedModel
from services.frontend.settings import HttpSettings
from tests.batch_process import QUICK, answering
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import served_model, write_model
from tests.patience import PATIENCE_S

DOCUMENT = openapi_document()
EXAMPLES = 6
BODY_CHARACTERS_MAX = 2_000_000
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory = write_model(tmp_path_factory.mktemp("model"))
    return served_model(directory, features=frozenset({"logprobs", "logit_bias", "structured_output"}))


@pytest.fixture(scope="module")
def served(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApps]:
    """A frontend in a thread with its own event loop, because Schemathesis calls it synchronously."""
    ready: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    directory = tmp_path_factory.mktemp("state")

    async def serve() -> None:
        apps = AppSettings(batches=QUICK)
        # The document lists the declared fields. By default a frontend also accepts undeclared ones.
        http = HttpSettings(refuses_unknown_fields=True)
        async with running_apps([model], answering(model), directory, apps=apps, http=http, seed=1) as running:
            ready.put_nowait(running)
            await stop.wait()
            assert 'code="500"' not in running.metrics()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(ready.get(), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        loop.close()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """A session that keeps its connection."""
    with requests.Session() as session:
        yield session


schema = schemathesis.openapi.from_dict(DOCUMENT)


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
)  # fmt: skip
def test_schemathesis_finds_no_mismatch(
    case: "schemathesis.Case[Any]", served: RunningApps, session: requests.Session
) -> None:
    """Sends valid and invalid requests to every operation: no 5xx, and no response that the document does not describe.

    About 6 000 requests: both sides of every bound of every field, then EXAMPLES random ones each, the same in every run.
    """
    name_the_model(case)
    if len(repr(case.body)) > BODY_CHARACTERS_MAX:
        return  # Bodies with lists just over their maximum are refused for their size alone.
    response = case.call(base_url=served.url, timeout=PATIENCE_S, session=session)
    case.validate_response(response, checks=CHECKS)


def name_the_model(case: "schemathesis.Case[Any]") -> None:
    """Replaces generated model names, which are never served, so that requests get past the first check."""
    if isinstance(case.body, dict) and isinstance(name := case.body.get("model"), str) and 0 < len(name) <= 256:
        case.body["model"] = "tiny"
        if isinstance(count := case.body.get("n"), int):
            case.body["n"] = min(count, 2)


def test_every_route_is_described(served: RunningApps) -> None:
    """Every described operation is served."""
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    for method, path in described:
        concrete = re.sub(r"\{[a-z_]+\}", "x", path)
        status, answer = run(served, served.call(method, concrete, b"{}" if method == "POST" else None))
        assert status != 405 and (answer is None or answer.get("error", {}).get("code") != "not_found"), (method, path)


def run(served: RunningApps, call: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """Runs a call in the server's loop. Returns None as the body if it is not JSON."""
    loop = served.session._loop

    async def guarded() -> tuple[int, Any]:
        try:
            status, answer, _ = await call
        except Exception as error:
            if "unexpected mimetype" not in str(error):
                raise
            return 200, None
        return status, answer if isinstance(answer, dict) else None

    return asyncio.run_coroutine_threadsafe(guarded(), loop).result(PATIENCE_S)


def test_the_document_is_valid() -> None:
    """Schemas are valid JSON Schema, every reference resolves, and every operation has a unique name."""
    for each in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate({**each, "$schema": "https://json-schema.org/draft/2020-12/schema"})
    known = DOCUMENT["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT))
    assert set(references) <= known.keys()
    names = [each["operationId"] for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names))


BODIES: dict[str, list[dict[str, Any]]] = {
    "ChatRequest": [
        {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["x"]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}],
         "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto",
         "response_format": None},
    ],
    "CompletionRequest": [{"prompt": ["a", "b"], "echo": True, "max_tokens": 5}, {"prompt": [5, 6]}],
    "ResponseRequest": [{"input": "Hi", "store": True}, {"input": [{"role": "user", "content": "Hi"}], "text": {}}],
    "MessageRequest": [{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "thinking": {
        "type": "disabled"}}],
    "CountRequest": [{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}],
    "TokenizeRequest": [{"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}],
    "DetokenizeRequest": [{"tokens": [5, 6]}],
}  # fmt: skip


def test_valid_bodies_and_their_answers_match_the_schemas(served: RunningApps) -> None:
    """Typical bodies match their schema and are answered, and the answers match theirs."""
    validators = {name: validator(name) for name in DOCUMENT["components"]["schemas"]}
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            name = content["schema"]["$ref"].rpartition("/")[2] if content else ""
            for body in BODIES.get(name, []):
                full = {"model": "tiny", **body}
                validators[name].validate(full)
                status, answer = run(served, served.call(method.upper(), path, full))
                assert status == 200, (path, answer)
                answered = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
                validators[answered.rpartition("/")[2]].validate(answer)


def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    """Returns a validator of a named schema that resolves the document's other schemas."""
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )


def test_the_description_has_every_field_that_is_read() -> None:
    """The document has exactly the fields of the request classes, and the reasons for refused ones."""
    for kind in REQUESTS:
        described = DOCUMENT["components"]["schemas"][kind.__name__]
        assert described["properties"].keys() == set(kind.__struct_encode_fields__)
        assert described["additionalProperties"] is False
    fields = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["audio"]["description"] == "Refused: there is no audio output."
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}


class Links(HTMLParser):
    """Collects the links, ids and tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}


async def test_the_page_loads_nothing_external(model: ServedModel, tmp_path: Path) -> None:
    """Every link resolves within the page, and there is no script. The page has every operation."""
    async with running_apps([model], answering(model), tmp_path) as running:
        async with running.session.get(running.url + "/docs") as response:
            page = await response.text()
            assert response.status == 200
            assert response.content_type == "text/html"
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        async with running.session.get(running.url + "/openapi.json") as response:
            assert await response.json() == DOCUMENT
    links = Links()
    links.feed(page)
    assert "script" not in links.tags
    for link in links.found:
        assert link == "/openapi.json" or (link.startswith("#") and link[1:] in links.ids), link
    for path in DOCUMENT["paths"]:
        assert f"<code>{path}</code>" in page
    assert "<code>previous_response_id</code>" in page
