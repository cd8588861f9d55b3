"""What is replaced in SGLang and PyTorch: seeds of single requests, calls of bootstrap servers, the address of the ranks' store."""

import errno
import importlib
import socket
import struct
from datetime import timedelta
from typing import Any

from xxhash import xxh3_64_intdigest

ASK_TIMEOUT_S = 1.0
"""SGLang waits for 5 s, during which no request of the engine makes a step."""
ASKS_MAX = 3
"""SGLang asks a server that does not answer 15 times, a second apart. A prefill engine of the mesh listens before it is announced."""
BACKLOG = 128


def honor_seeds(*, is_cpu: bool) -> None:
    """Makes every batch carry its requests' seeds. The adapter gives each request one.

    SGLang honours seeds in its deterministic mode only, which its CPU attention does not support. Here its sampler draws each token from the
    seed and the position alone, so an answer can be continued by another engine. It cannot combine seeds with `min_p`, which the adapter
    refuses.
    """
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    if is_cpu:
        # SGLang's own is a kernel for GPUs.
        sampler.multinomial_with_seed = draw


def draw(logprobs: Any, seeds: Any, positions: Any) -> Any:
    """Returns one index per row, drawn with the row's probabilities by a generator of its seed and position. Shape: rows x 1."""
    import torch

    generator = torch.Generator()
    rows = []
    for row, seed, position in zip(logprobs.exp(), seeds.tolist(), positions.tolist(), strict=False):
        generator.manual_seed(xxh3_64_intdigest(struct.pack("<qq", seed, position)))
        rows.append(torch.multinomial(row, 1, generator=generator))
    return torch.stack(rows)


def limit_waits() -> None:
    """Limits SGLang's questions to a bootstrap server, which a decode engine asks from its scheduling loop.

    A server that does not answer in time is asked again, or its request fails. Affects this process's GET calls only.
    """
    import requests

    original = requests.Session.request

    def request(self: Any, method: str, url: str, *arguments: Any, **options: Any) -> Any:
        timeout = options.get("timeout")
        if method.upper() == "GET" and isinstance(timeout, (int, float)):
            options["timeout"] = min(float(timeout), ASK_TIMEOUT_S)
        return original(self, method, url, *arguments, **options)

    requests.Session.request = request  # type: ignore[method-assign, assignment]


def limit_asks(scheduler: Any) -> None:
    """Requests whose bootstrap server does not answer fail after ASKS_MAX questions. `scheduler` is SGLang's."""
    if scheduler.disagg_decode_prealloc_queue is not None:
        scheduler.disagg_decode_prealloc_queue._max_ensure_retries = ASKS_MAX


def restrict_store() -> None:
    """Makes PyTorch's stores that are created from now on listen only on the address to which the ranks connect.

    By default a store listens on all interfaces without authentication.
    """
    from torch.distributed import TCPStore

    # `torch.distributed` has a function of this name, too.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create_anywhere = rendezvous._create_c10d_store

    def create(  # noqa: PLR0917  # torch.distributed calls it.
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> Any:
        listener = listen(hostname, port) if rank == 0 else None
        if listener is None:
            return create_anywhere(hostname, port, rank, world_size, timeout, use_libuv)
        return TCPStore(
            host_name=hostname,
            port=port,
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            # The store closes it.
            master_listen_fd=listener.detach(),
            use_libuv=use_libuv,
        )

    rendezvous._create_c10d_store = create


def listen(host: str, port: int) -> socket.socket | None:
    """Returns a listening socket. None: no interface of this machine has the address, as with the name of a Kubernetes service."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
