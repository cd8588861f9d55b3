"""Served models from a real registry, and chat templates."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import SamplingParams
from kvmesh.discovery.base import DECODE, PREFILL, Registration
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import InvalidRequestError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.model_files import digest_of_files, find_directory, list_files
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.worker_client import GrpcWorkerClient
from services.frontend.access.caller import ANYBODY, Caller
from services.frontend.model_cards import CARD_PREFIX, read_card
from services.frontend.models import DiscoveredModels
from services.frontend.parsers.select import ParserNames
from services.frontend.pipeline.prepare import prepare
from services.frontend.pipeline.request import Conversation, Request
from services.frontend.settings import ModelSettings
from services.frontend.text.templates import ChatTemplate
from tests.frontend_mesh import served_model, write_model
from tests.patience import PATIENCE_S


@dataclass(slots=True)
class Mesh:
    """A registry, a gRPC server for its health checks, and the models that follow the registry."""

    models: DiscoveredModels
    registry: ConsulRegistry
    server: RpcServer

    async def add_worker(
        self,
        worker_id: str,
        directory: Path,
        *,
        service: str = DECODE,
        epoch: str = "1",
        blocks: str = "32",
        **card: Any,
    ) -> None:
        """Registers a worker with its card."""
        record = {
            "name": "tiny",
            "source": str(directory),
            "context_tokens_max": 512,
            "vocabulary_size": 402,
            "eos_token_ids": [7],
            **card,
        }
        await self.registry.put(CARD_PREFIX + worker_id, json.dumps(record).encode())
        role = service.removeprefix("kvmesh-")
        meta = {"model": "tiny", "role": role, "block_size_tokens": blocks, "epoch": epoch}
        await self.registry.register(
            Registration(
                service=service,
                instance_id=worker_id,
                host="127.0.0.1",
                port=self.server.port,
                meta=meta,
                check_interval_s=0.1,
                ttl_s=60,
            )
        )
        await self.registry.heartbeat(worker_id)


@asynccontextmanager
async def following(*, parsers: ParserNames | None = None, **settings: Any) -> AsyncIterator[Mesh]:
    """Runs models that follow an embedded registry."""
    agent = EmbeddedAgent()
    await agent.start()
    server = RpcServer(RpcSettings(grace_s=0), service_names=[], add_services=lambda _: None)
    await server.start()
    await server.set_serving(True)
    registry = ConsulRegistry(DiscoverySettings(address=agent.address, call_timeout_s=PATIENCE_S))
    channels = ChannelPool(settings=RpcSettings())
    models = DiscoveredModels(
        registry=registry,
        source=GrpcWorkerClient(channels),
        settings=ModelSettings(**settings),
        clock=SystemClock(),
        parsers=parsers,
    )
    task = asyncio.create_task(models.run())
    try:
        yield Mesh(models, registry, server)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await channels.aclose()
        await registry.aclose()
        await server.aclose()
        await agent.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_unknown_models_and_a_mesh_without_models_give_different_errors() -> None:
    """While no model is served, the error has a time after which the client may retry."""
    async with following() as mesh:
        with pytest.raises(UnavailableError) as caught:
            mesh.models.find("anything")
        assert caught.value.retry_after_s
        assert mesh.models.served() == []


def test_invalid_cards_are_refused() -> None:
    """Cards of workers are not trusted, so values that are no valid card raise UnsupportedError."""
    for value in (b"", b"[]", b"{}", b'{"name":"x","source":"y","context_tokens_max":"many"}'):
        with pytest.raises(UnsupportedError):
            read_card(value)


async def test_a_parser_that_does_not_match_is_logged_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A parser that does not match the model is logged once with the reason. The model is served with the configured parser anyway."""
    write_model(tmp_path)
    names = ParserNames(tools="tiny=mistral,other=kimi_k2")
    with caplog.at_level(logging.WARNING):
        async with following(parsers=names) as mesh:
            await mesh.add_worker("d0", tmp_path)
            await until(mesh.models.served)
            selection = mesh.models.find("tiny").text.selection
    assert selection.tools is not None
    assert selection.tools.name == "mistral"
    records = [record for record in caplog.records if record.message == "parser_does_not_fit"]
    assert [record.data["model"] for record in records] == ["tiny"]  # type: ignore[attr-defined]
    assert records[0].data["detail"] == selection.problems[0]  # type: ignore[attr-defined]


async def test_a_model_is_served_while_it_has_a_decode_worker(tmp_path: Path) -> None:
    """Its workers' cards and files describe a model. Without a decode worker its requests fail with UnavailableError, not NotFoundError."""
    write_model(tmp_path)
    async with following() as mesh:
        models = mesh.models
        await mesh.add_worker("p0", tmp_path, service=PREFILL, features=["structured_output"])
        await until(lambda: models.problems())
        assert models.served() == []
        await mesh.add_worker("d0", tmp_path, adapters=["lora-a"], features=["logprobs"], context_tokens_max=256)
        await until(lambda: models.served() and models.served()[0].workers_ready == 2)
        model = models.find("tiny")
        assert (model.block_size_tokens, model.context_tokens_max) == (32, 256)
        assert model.features == {"structured_output", "logprobs"}
        assert model.eos_token_ids == {2, 7}
        assert (models.find("lora-a").name, models.find("lora-a").adapter) == ("tiny", "lora-a")
        with pytest.raises(NotFoundError):
            models.find("other")
        await mesh.registry.set_draining("d0", True)
        await until(lambda: not models.served())
        with pytest.raises(UnavailableError):
            models.find("tiny")
        await mesh.registry.deregister("d0")
        await mesh.registry.deregister("p0")
        await until(lambda: not models.problems())
        with pytest.raises(UnavailableError):
            models.find("tiny")


@pytest.mark.parametrize("meta", [{"epoch": "²"}, {"blocks": "²"}])
async def test_meta_that_is_no_number_does_not_end_the_models(tmp_path: Path, meta: dict[str, str]) -> None:
    """The registry's meta is not trusted. "²" counts as a digit in Python, but is not an integer."""
    write_model(tmp_path)
    async with following() as mesh:
        await mesh.add_worker("d0", tmp_path, **meta)
        await until(mesh.models.served)
        assert mesh.models.find("tiny").block_size_tokens == (0 if "blocks" in meta else 32)


async def test_workers_with_differing_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has the files of most decode workers. The log names the others, which do not count. Files that cannot be loaded are ignored."""
    old, new = write_model(tmp_path / "old"), write_model(tmp_path / "new")
    (new / "chat_template.jinja").write_text("new")
    digests = [digest_of_files(list_files(directory)) for directory in (old, new)]
    monkeypatch.setattr("services.frontend.models.RELOAD_S", 0.1)
    with caplog.at_level(logging.WARNING):
        async with following(files_dir=str(tmp_path / "cache")) as mesh:
            models = mesh.models
            await mesh.add_worker("d0", old, files_digest=digests[0], features=["logprobs"])
            await until(models.served)
            assert models.find("tiny").files_digest == digests[0]
            await mesh.add_worker("d1", new, files_digest=digests[1])
            await mesh.add_worker("d2", new, files_digest=digests[1])
            await until(lambda: models.find("tiny").files_digest == digests[1])
            model = models.find("tiny")
            assert model.text.template.render(Conversation(messages=[])) == "new"
            assert (model.workers_ready, model.features) == (2, frozenset())
            for worker_id in ("d3", "d4", "d5"):
                await mesh.add_worker(worker_id, tmp_path / "missing", files_digest="0" * 64)
            await until(lambda: len(models._cards) == 6)
            assert models.find("tiny").files_digest == digests[1]
    records = [record.data for record in caplog.records if record.message == "model_files_differ"]  # type: ignore[attr-defined]
    assert records[0]["workers"].keys() == {digest[:12] for digest in digests}


async def test_a_model_without_files_is_reported_and_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose files are missing is reported with the reason, and the frontend tries to load it again."""
    monkeypatch.setattr("services.frontend.models.RELOAD_S", 0.1)
    async with following() as mesh:
        await mesh.add_worker("d0", tmp_path / "later")
        await until(lambda: "later" in mesh.models.problems().get("tiny", ""))
        with pytest.raises(UnavailableError, match="later"):
            mesh.models.find("tiny")
        write_model(tmp_path / "later")
        await until(lambda: mesh.models.served())


def test_a_hub_model_is_found_in_the_cache(tmp_path: Path) -> None:
    """The cache is searched by the model's reference, without the hub's library. The error names a model that is missing."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    write_model(snapshot)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    assert find_directory("org/name", revision="", cache_dir=str(tmp_path)) == snapshot
    assert find_directory(str(snapshot), revision="", cache_dir="") == snapshot
    with pytest.raises(UnsupportedError, match="org/other"):
        find_directory("org/other", revision="", cache_dir=str(tmp_path))


def test_generation_defaults(tmp_path: Path) -> None:
    """The defaults replace parameters that the request does not set. `do_sample: false` means greedy decoding."""
    write_model(tmp_path)

    def temperature(**sampling: float) -> float | None:
        request = Request(request_id="r", model="tiny", prompt="", sampling=SamplingParams(**sampling))
        model = served_model(tmp_path)
        prepared = prepare(request, model, [1], hashes=[], features=(), caller=ANYBODY, attempt_timeout_s=1.0)
        return prepared.generation.sampling.temperature

    assert (temperature(), temperature(temperature=1.0)) == (0.5, 1.0)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    assert temperature() == 0.0


def render(source: str, conversation: Conversation | None = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, SystemClock())
    return template.render(
        conversation or Conversation(messages=[{"role": "user", "content": "<é>"}]), field="messages"
    )


def test_templates_support_hugging_face_extensions() -> None:
    """Templates have special tokens, unescaped JSON, loop controls, generation blocks, dates and arguments."""
    assert render("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "<é>"}]'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "<é>"
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    conversation_with_arguments = Conversation(messages=[], arguments={"thinking": True, "messages": "no"})
    assert render("{{ thinking }}{{ messages }}{{ tools }}", conversation_with_arguments) == "True[]None"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content.x.y }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_failing_template_is_an_error_of_the_request(source: str) -> None:
    """A template that fails, or tries to leave the sandbox, raises InvalidRequestError with the field of the messages."""
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert caught.value.field == "messages"


def test_a_template_that_does_not_parse_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        render("{% if %}")


async def test_cards_of_deregistered_workers_are_removed(tmp_path: Path) -> None:
    """Cards of deregistered workers are removed, because restarted workers have new names."""
    directory = write_model(tmp_path)
    async with following() as mesh:
        await mesh.add_worker("stays", directory)
        for number in range(10):
            await mesh.add_worker(f"d{number}", directory)
            async with asyncio.timeout(PATIENCE_S):
                while f"d{number}" not in mesh.models._cards:
                    await asyncio.sleep(0.01)
            await mesh.registry.deregister(f"d{number}")
        async with asyncio.timeout(PATIENCE_S):
            while set(mesh.models._cards) != {"stays"}:
                await asyncio.sleep(0.01)


async def test_a_model_that_a_key_may_not_use_reads_as_an_absent_one(tmp_path: Path) -> None:
    """A model that a key may not use has the error of an absent one, which does not disclose its existence. Both say where the names are."""
    write_model(tmp_path)
    async with following() as mesh:
        await mesh.add_worker("d0", tmp_path)
        await until(mesh.models.served)
        with pytest.raises(NotFoundError) as absent:
            mesh.models.find("secret")
    with pytest.raises(NotFoundError) as forbidden:
        Caller(models=frozenset({"tiny"})).check_model("secret")
    assert absent.value.message == forbidden.value.message
    assert "the model 'secret' does not exist; /v1/models" in absent.value.message
    assert (absent.value.reason, absent.value.field) == (forbidden.value.reason, forbidden.value.field)
