"""Worker descriptions, asks and fleets for router tests."""

from random import Random

from kvmesh.core import Ask, Capabilities, Handoff, KvBatch, KvStored, ModelCard, Role, WorkerDescription, WorkerRef
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings, QueueSettings
from services.router.workers.worker import RegisteredWorker

BLOCK = 16


def core(*, router_id: str = "router", run_id: str = "", seed: int = 1, policy="kv", **settings) -> RouterCore:
    """Returns a core without a queue, unless the test configures one. `policy`: its name or class."""
    settings.setdefault("queue", QueueSettings(requests_max=0))
    if isinstance(policy, str):
        settings["policy"], policy = policy, None
    chosen = CoreSettings(**settings)
    return RouterCore(chosen, router_id=router_id, run_id=run_id, policy=policy, generator=Random(seed))


def description(name: str, role: str, **options) -> WorkerDescription:
    return WorkerDescription(
        worker=WorkerRef(worker_id=name, address=f"{name}:1", epoch=options.get("epoch", 1)),
        role=Role(role),
        model=ModelCard(
            name=options.get("model", "demo"),
            source="models/demo",
            context_tokens_max=4096,
            vocabulary_size=100,
            adapters=tuple(options.get("adapters", ())),
            files_digest=options.get("files", ""),
        ),
        capabilities=Capabilities(
            engine=options.get("engine", "simulated"),
            engine_version="1",
            handoffs=options.get("handoffs", (Handoff.SEQUENTIAL,)),
            roles=(Role.PREFILL, Role.DECODE),
            features=tuple(options.get("features", ("kv_events",))),
            data_parallel_size=options.get("ranks", 1),
        ),
        kv_compatibility_hash=options.get("hash", "same"),
        block_size_tokens=options.get("block", BLOCK),
        kv_blocks_total=options.get("kv_blocks", 1000),
        rendezvous_address=options.get("rendezvous", ""),
        rank_rendezvous_addresses=options.get("rank_rendezvous", ()),
        profile=options.get("profile"),
        requires_prefill=options.get("requires_prefill", False),
    )


def join(router: RouterCore, name: str, role: str, **options) -> RegisteredWorker:
    """Adds a worker that is registered, described and connected, with an empty snapshot of its blocks."""
    worker = router.fleet.register(
        name,
        address=options.get("address", f"{name}:1"),
        role=Role(role),
        labels=options.get("labels", {}),
        is_critical=False,
        is_draining=False,
    )
    router.fleet.describe(worker, description(name, role, **options))
    assert worker.feed is not None
    worker.feed.apply(KvBatch(epoch=1, sequence=0, is_snapshot=True))
    router.fleet.connected(worker)
    return worker


def store_blocks(worker: RegisteredWorker, hashes, parent: int | None = None, sequence: int | None = None) -> None:
    """Applies an event in which the worker reports that it stored a run of blocks."""
    feed = worker.feed
    assert feed is not None
    if sequence is None:
        assert feed.resume_at is not None
        sequence = feed.resume_at[1] + 1
    feed.apply(KvBatch(epoch=1, sequence=sequence, events=(KvStored(block_hashes=tuple(hashes), parent_hash=parent),)))


def ask(name: str, hashes=(), **options) -> Ask:
    tokens = options.pop("tokens", max(1, BLOCK * len(hashes)))
    options.setdefault("model", "demo")
    options.setdefault("block_size_tokens", BLOCK)
    return Ask(request_id=name, prompt_tokens=tokens, block_hashes=tuple(hashes), **options)
