"""The other tensor-parallel ranks of this machine, each a process that dies with its first rank."""

import contextlib
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Iterator

from kvmesh.engines.sglang.settings import SglangSettings
from kvmesh.lifecycle.process import die_with_parent


@contextlib.contextmanager
def start_other_ranks(settings: SglangSettings, distributed_port: int) -> Iterator[None]:
    """Runs the ranks while the context is active. This process ends when one of them does, because the others would wait for it forever."""
    context = multiprocessing.get_context("spawn")
    # Plain values: settings of SGLang would import it before `cpu.prepare`.
    fields = dataclasses.asdict(settings)
    processes = [
        context.Process(target=run_rank, args=(fields, number, distributed_port, os.getpid()), daemon=True)
        for number in settings.ranks_here[1:]
    ]
    for process in processes:
        process.start()
        threading.Thread(target=_end_with, args=(process,), daemon=True).start()
    yield


def run_rank(fields: dict[str, object], number: int, distributed_port: int, parent: int) -> None:  # noqa: PLR0917  # A process gets a tuple.
    """The main function of a rank's process."""
    die_with_parent(parent)
    from kvmesh.engines.sglang.host.rank import Rank

    rank = Rank(SglangSettings(**fields), number=number, distributed_port=distributed_port)  # type: ignore[arg-type]
    rank.start(None)
    rank.run()


def _end_with(process: multiprocessing.process.BaseProcess) -> None:
    process.join()
    os._exit(1)
