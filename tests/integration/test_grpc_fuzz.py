"""Messages that no client would send, to every method of both services: the status is never a server error, and no state is left.

`KVMESH_FUZZ_MESSAGES` sets the number of messages, `KVMESH_FUZZ_SEED` the seed.
"""

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvmesh.api.inference import grpc_service_pb2 as kserve_pb
from kvmesh.api.inference.grpc_service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from kvmesh.api.types.v1.sampling_pb2 import SamplingParams
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.telemetry import Telemetry
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.api.kserve.servicer import SERVICE_NAME as KSERVE_NAME
from services.frontend.api.kserve.servicer import KserveServicer
from services.frontend.models import ServedModel
from services.frontend.settings import BatchSettings
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import FakeMesh, served_model, tokens_of, write_model
from tests.grpc_messages import filled, mutated, random_bytes
from tests.patience import PATIENCE_S

MESSAGES = int(os.environ.get("KVMESH_FUZZ_MESSAGES", "10000"))
SEED = int(os.environ.get("KVMESH_FUZZ_SEED", "1"))
AT_ONCE = 24
SEND_FAILED = "Internal error from Core"
DEFECTS = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
GROWTH_BYTES_MAX = (12 if MESSAGES <= 10_000 else 24) << 20
FEATURES = frozenset({"logprobs", "logit_bias", "structured_output", "prompt_logprobs"})
SERVICES = (
    pb.DESCRIPTOR.services_by_name["InferenceService"],
    kserve_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
)
SAMPLING = SamplingParams(max_tokens=3, temperature=0.5, stop=["xyz"])
OPTIONS = pb.GenerationOptions(sampling=SAMPLING, stream=True)
USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="Hi")
TOOL = pb.Tool(name="get_weather", parameters_json='{"type": "object", "properties": {"city": {"type": "string"}}}')
CHAT = pb.ChatRequest(model="tiny", messages=[USER, USER], tools=[TOOL], options=OPTIONS)
TEXT_INPUT = kserve_pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
INFER = kserve_pb.ModelInferRequest(
    model_name="tiny", id="1", inputs=[TEXT_INPUT], raw_input_contents=[b"\x02\x00\x00\x00Hi"],
    parameters={"max_tokens": kserve_pb.InferParameter(int64_param=3)},
)  # fmt: skip
BATCH_LINE = pb.BatchLine(custom_id="a", body='{"model": "tiny", "prompt": "x", "max_tokens": 2}')
VALID: dict[str, Message] = {
    "Generate": pb.GenerateRequest(model="tiny", text="Hello", options=OPTIONS),
    "Chat": CHAT,
    "Embed": pb.EmbedRequest(model="tiny", texts=["Hello"]),
    "Tokenize": pb.TokenizeRequest(model="tiny", chat=CHAT),
    "Detokenize": pb.DetokenizeRequest(model="tiny", token_ids=[5, 6, 7]),
    "CreateBatch": pb.CreateBatchRequest(endpoint=2, lines=pb.BatchLines(lines=[BATCH_LINE])),  # type: ignore[arg-type]
    "GetBatch": pb.GetBatchRequest(batch_id="batch_1"),
    "ListBatches": pb.ListBatchesRequest(page_size=2),
    "CancelBatch": pb.CancelBatchRequest(batch_id="batch_1"),
    "ListBatchResults": pb.ListBatchResultsRequest(batch_id="batch_1"),
    "ModelReady": kserve_pb.ModelReadyRequest(name="tiny"),
    "ModelMetadata": kserve_pb.ModelMetadataRequest(name="tiny"),
    "ModelInfer": INFER,
    "ModelStreamInfer": INFER,
}
# Methods with more input to validate are called more often.
WEIGHTS = {"Generate": 5, "Chat": 8, "Tokenize": 4, "ModelInfer": 6, "ModelStreamInfer": 4, "Embed": 2}


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    descriptor: Any

    @property
    def name(self) -> str:
        return str(self.descriptor.name)


METHODS = [Method(f"/{service.full_name}/{each.name}", each) for service in SERVICES for each in service.methods]


@dataclass(slots=True)
class Target:
    channel: grpc.aio.Channel
    apps: RunningApps
    telemetry: Telemetry

    def defects(self) -> list[Any]:
        """Returns the server's own counts of calls that ended with a status of DEFECTS."""
        samples = [sample for family in self.telemetry.registry.collect() for sample in family.samples]
        return [each for each in samples if each.labels.get("code") in DEFECTS and each.value]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), features=FEATURES, adapters=("lora",))


@pytest.fixture
async def target(model: ServedModel, tmp_path: Path) -> AsyncIterator[Target]:
    tokens = tokens_of(model.text, 'one <tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>')
    mesh = FakeMesh(answer=lambda _: tokens, tokens_per_step=8)
    for name in ("asks", "reports", "prefills", "generations", "legs", "released", "cancelled", "rendezvous"):
        setattr(mesh, name, Counted())
    # Keeps only a few batches, because the disk would limit the speed.
    settings = AppSettings(batches=BatchSettings(batches_max=20, files_max=40))
    async with running_apps([model], mesh, tmp_path, apps=settings) as apps:
        calls = apps.batches.service

        def add(server: grpc.aio.Server) -> None:
            add_InferenceServiceServicer_to_server(InferenceServicer(apps.pipeline, lambda: calls), server)
            add_GRPCInferenceServiceServicer_to_server(KserveServicer(apps.pipeline), server)

        telemetry = Telemetry.create("frontend")
        server = RpcServer(
            RpcSettings(grace_s=0.1),
            service_names=[SERVICE_NAME, KSERVE_NAME],
            add_services=add,
            interceptors=server_interceptors(telemetry),
        )
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield Target(channel, apps, telemetry)
        await server.aclose()


def message_of(rng: random.Random, method: Method) -> bytes:
    kind, valid = rng.random(), VALID.get(method.name)
    if kind < 0.15:
        return random_bytes(rng)
    if kind < 0.25 and valid is not None:
        return valid.SerializeToString()
    if kind < 0.6 and valid is not None:
        return mutated(rng, valid.SerializeToString())
    message = GetMessageClass(method.descriptor.input_type)()
    if valid is not None and rng.random() < 0.7:
        message.CopyFrom(valid)
        # Fields filled on top of a valid message get past more checks than a message of random values only.
        name = rng.choice(message.DESCRIPTOR.fields).name
        single = filled(rng, type(message)())
        for field, value in single.ListFields():
            if field.name == name:
                one = type(message)()
                (getattr(one, name).CopyFrom if field.message_type and not field.is_repeated else _ignore)(value)
                message.MergeFrom(single if rng.random() < 0.3 else one)
        return message.SerializeToString()
    return filled(rng, message).SerializeToString()


def _ignore(_: Any) -> None: ...


async def code_of(channel: grpc.aio.Channel, method: Method, messages: list[bytes]) -> str:
    """Returns the status with which the call ended."""
    descriptor = method.descriptor
    try:
        if descriptor.client_streaming:
            call = channel.stream_stream(method.path)(iter(messages), timeout=20)
        elif descriptor.server_streaming:
            call = channel.unary_stream(method.path)(messages[0], timeout=20)
        else:
            await channel.unary_unary(method.path)(messages[0], timeout=20)
            return "OK"
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        if error.details() == SEND_FAILED and descriptor.client_streaming:
            # The client library reports this if it could not send a message because the server had already ended the call. The server's own
            # count has the status with which it ended the call.
            return "ENDED"
        return f"{error.code().name}: {error.details()}"
    return "OK"


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Counted(list[Any]):
    """A list that counts its items without keeping them, because the fake mesh's memory would hide the frontend's."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def append(self, _: Any) -> None:
        self._count += 1

    def __len__(self) -> int:
        return self._count


class Round:
    """Many concurrent clients, until so many messages were sent or a call ended with a status of DEFECTS."""

    def __init__(self, target: Target, rng: random.Random) -> None:
        self._target = target
        self._rng = rng
        self._weights = [WEIGHTS.get(method.name, 1) for method in METHODS]
        self.sent = 0
        self.codes: Counter[str] = Counter()
        self.methods: set[str] = set()
        self.failure = ""

    async def until(self, sent: int) -> None:
        await asyncio.gather(*(self._client(sent) for _ in range(AT_ONCE)))

    async def _client(self, until: int) -> None:
        while self.sent < until and not self.failure:
            (method,) = self._rng.choices(METHODS, self._weights)
            count = self._rng.randint(1, 3) if method.descriptor.client_streaming else 1
            messages = [message_of(self._rng, method) for _ in range(count)]
            self.sent += count
            code = await code_of(self._target.channel, method, messages)
            word = code.partition(":")[0]
            self.codes[word] += 1
            self.methods.add(method.name)
            if word in DEFECTS:
                self.failure = f"{method.name} {code} {messages!r}"

    async def tasks_left(self) -> int:
        """Waits until nothing is in flight. Returns the number of tasks."""
        apps = self._target.apps
        async with asyncio.timeout(PATIENCE_S):
            while apps.pipeline.in_flight or apps.mesh.running or apps.batches.running:
                await asyncio.sleep(0.01)
        gc.collect()
        return len(asyncio.all_tasks())


@pytest.mark.timeout(0 if MESSAGES > 20_000 else 600)
async def test_odd_messages_never_fail_the_server(target: Target) -> None:
    """No call ends with INTERNAL, UNKNOWN or DATA_LOSS. Afterwards no request or task is left, and memory has not grown."""
    round_ = Round(target, random.Random(SEED))
    # The first part fills all caches. Later growth is in proportion to the number of messages.
    await round_.until(min(MESSAGES // 4, 5000))
    tasks, memory_bytes = await round_.tasks_left(), rss_bytes()
    await round_.until(MESSAGES)
    assert not round_.failure
    assert not target.defects()
    async with asyncio.timeout(PATIENCE_S):
        # The server's tasks of calls end a moment after the calls.
        while await round_.tasks_left() > tasks:
            await asyncio.sleep(0.05)
    assert rss_bytes() - memory_bytes < GROWTH_BYTES_MAX
    codes = round_.codes
    print(dict(codes), f"memory {(rss_bytes() - memory_bytes) >> 20:+} MiB")
    assert codes["OK"] > round_.sent * 0.1 and codes["INVALID_ARGUMENT"] > round_.sent * 0.1, codes
    assert round_.methods == {method.name for method in METHODS}
