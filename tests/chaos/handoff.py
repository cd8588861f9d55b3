"""Stops services and cuts the network at every step of the KV handoff, and checks for wrong tokens.

`python -m tests.chaos.handoff --engine vllm --answers 1000` runs until it has received that many answers. Each round sends requests through two
frontends, then stops one service, or cuts the path between two, at a random moment. The fault lasts for 0.5, 1 or 2 leases. Requests through the
other frontend continue and use the freed blocks. An answer is right if its tokens equal those that the mesh generated before the first fault. A
typed error is not a wrong answer. A request that never ends counts as hung.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp

from kvmesh.discovery.base import DECODE
from tests.chaos.hosted import LEASE_S, Mesh, registry_address
from tests.chaos.hosts import Host, Hosts, make_hosts, network_problem
from tests.integration.mesh import ROOT, metrics_text, worker_metric
from tests.integration.vllm_model import add_tokenizer, make_model
from tests.patience import PATIENCE_S
from tests.servers import free_ports

STOPPED = ("frontend", "prefill", "decode")
CUT = (("frontend", "prefill"), ("frontend", "decode"), ("prefill", "decode"))
LEASES = (0.5, 1.0, 2.0)
PROMPTS = 120
PROMPT_TOKENS = (130, 400)
ANSWER_TOKENS = 8
# Every request is handed off, including those that a cost model would leave to the decode worker. Breakers stay open only briefly, because
# otherwise
# all requests of some rounds would be refused after consecutive faults.
ROUTER_ARGV = ("--policy", "round_robin", "--breaker-pause-min-s", "0.2", "--breaker-pause-max-s", "0.2")
CLIENTS = 6
"""Requests in flight per frontend."""
BEFORE_S = 0.3
"""A fault begins within this time after a round's first request."""
ANSWER_TIMEOUT_S = 60.0
"""A request without an end within this time counts as hung. Idle limits of the mesh are shorter."""
ROUND_S = 1.5
"""How long requests continue after a fault."""


@dataclass(slots=True)
class Outcomes:
    """Number of requests by outcome: right, wrong, hung, or the reason of a typed error."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        """Number of answers with tokens."""
        return self.counts["right"] + self.counts["wrong"]


@dataclass(slots=True)
class Handoffs:
    """A mesh with two frontends, of which `frontend` may be stopped, and the answers that it gives without faults."""

    mesh: Mesh
    hosts: Hosts
    urls: dict[str, str]
    rng: random.Random
    prompts: list[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=Outcomes)

    async def learn(self) -> None:
        """Records the answer to every prompt without faults."""
        async with self._session() as session:
            self.expected = [await self._ask_until_taken(session, prompt) for prompt in self.prompts]
        assert len({tuple(tokens) for tokens in self.expected}) > PROMPTS // 2, "the model's answers hardly differ"

    async def _ask_until_taken(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> list[int]:
        """Repeats a request that is refused because a busy machine delays the load records of the only decode worker."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await self._ask(session, "steady", prompt)
                except ConnectionError as error:
                    if str(error) != "503 no_worker":
                        raise
                await asyncio.sleep(0.1)

    async def run_round(self, fault: str, leases: float) -> None:
        """Runs one fault. Returns when all requests of the round have ended."""
        is_over = asyncio.Event()
        before = Counter(self.outcomes.counts)
        async with self._session() as session, asyncio.TaskGroup() as group:
            for name in [*["steady"] * CLIENTS, *["frontend"] * CLIENTS]:
                group.create_task(self._client(session, name, is_over))
            await asyncio.sleep(self.rng.uniform(0, BEFORE_S))
            self._begin(fault)
            try:
                await asyncio.sleep(leases * LEASE_S)
            finally:
                self._end(fault)
            await asyncio.sleep(ROUND_S)
            is_over.set()
        self.mesh.check_alive()
        print(f"{fault:18} {leases:3} leases: {dict(self.outcomes.counts - before)}", flush=True)

    def _begin(self, fault: str) -> None:
        first, _, second = fault.partition("|")
        if second:
            self.hosts.cut(first, second)
        else:
            self.mesh.send(first, signal.SIGSTOP)

    def _end(self, fault: str) -> None:
        first, _, second = fault.partition("|")
        if second:
            self.hosts.join(first, second)
        else:
            self.mesh.send(first, signal.SIGCONT)

    async def _client(self, session: aiohttp.ClientSession, name: str, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            number = self.rng.randrange(len(self.prompts))
            try:
                tokens = await self._ask(session, name, self.prompts[number])
            except TimeoutError:
                self.outcomes.counts["hung"] += 1
            except ConnectionError as error:
                self.outcomes.counts[str(error)] += 1
            else:
                self._judge(number, tokens)

    def _judge(self, number: int, tokens: list[int]) -> None:
        is_right = tokens == self.expected[number]
        self.outcomes.counts["right" if is_right else "wrong"] += 1
        if not is_right:
            self.outcomes.wrong.append(f"prompt {number}: {tokens} instead of {self.expected[number]}")

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S))

    async def _ask(self, session: aiohttp.ClientSession, frontend: str, prompt: Sequence[int]) -> list[int]:
        """Returns the answer's tokens. Raises ConnectionError with the reason of a typed error."""
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with session.post(f"{self.urls[frontend]}/v1/completions", json=body) as response:
            answer: Any = await response.json()
            if response.status != 200:
                raise ConnectionError(f"{response.status} {answer['error']['code']}")
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

    async def moved_tokens(self) -> float:
        """Returns the number of prompt tokens whose KV the decode worker received by NIXL."""
        (decode,) = await self.mesh.instances(DECODE)
        text = await metrics_text(decode.host, int(decode.meta["metrics_port"]))
        return worker_metric(text, "kvmesh_worker_transferred_tokens_total")


@asynccontextmanager
async def handoffs(engine: str, directory: Path, *, with_network: bool, seed: int) -> AsyncIterator[Handoffs]:
    """Starts one prefill worker, one decode worker, a router and two frontends."""
    rng = random.Random(seed)
    model = add_tokenizer(make_model(directory / "model")) if engine == "vllm" else ROOT / "models" / "demo"
    with make_hosts(["frontend", "prefill", "decode"], with_network=with_network) as hosts:
        # Without shared memory, KV uses the network too.
        environ = {"UCX_TLS": "tcp,self"} if with_network else {}
        mesh = Mesh(
            directory=directory,
            engine=engine,
            model=model,
            registry_address=registry_address(hosts.outside),
            environ=environ,
        )
        outside = Host("outside", hosts.outside)
        try:
            await mesh.start_registry(hosts.outside)
            await mesh.start_service("router", "router", outside, *ROUTER_ARGV)
            for role in ("prefill", "decode"):
                await mesh.start_worker(role, role, hosts.hosts[role])
            urls = {}
            for name, host in (("frontend", hosts.hosts["frontend"]), ("steady", outside)):
                port = free_ports(1)[0]
                urls[name] = f"http://{host.address}:{port}"
                await mesh.start_service(name, "frontend", host, "--http-port", str(port), "--http-host", host.address)
            await mesh.wait_serving(list(urls.values()))
            prompts = [[rng.randrange(10, 500) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(PROMPTS)]
            yield Handoffs(mesh=mesh, hosts=hosts, urls=urls, rng=rng, prompts=prompts)
        finally:
            hosts.join_all()
            await mesh.aclose()


def faults(has_network: bool) -> list[tuple[str, float]]:
    """Returns every stop and every cut, with every duration."""
    names = [*STOPPED, *("|".join(pair) for pair in CUT if has_network)]
    return list(product(names, LEASES))


def some_faults(has_network: bool, offset: int) -> list[tuple[str, float]]:
    """Returns every stop and every cut once. The durations alternate, starting with the one at `offset`."""
    names = dict.fromkeys(name for name, _ in faults(has_network))
    return [(name, LEASES[(number + offset) % len(LEASES)]) for number, name in enumerate(names)]


async def run(
    engine: str, answers: int, seed: int, todo: Sequence[tuple[str, float]], *, with_network: bool, directory: Path
) -> Outcomes:
    """Runs rounds until `answers` answers have arrived and each fault of `todo` has occurred once."""
    async with handoffs(engine, directory, with_network=with_network, seed=seed) as running:
        await running.learn()
        assert await running.moved_tokens() > 0, "nothing was handed off"
        rounds = 0
        while rounds < len(todo) or running.outcomes.answers < answers:
            await running.run_round(*todo[rounds % len(todo)])
            rounds += 1
        await running.mesh.wait_free()
        return running.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="simulated")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--only", default="", help="only this fault: a service, or two separated by |")
    parser.add_argument("--directory", type=Path, help="folder in which to keep the services' logs")
    options = parser.parse_args()
    problem = network_problem()
    print(f"seed {options.seed}; network between hosts: {problem or 'yes'}", flush=True)
    todo = [each for each in faults(not problem) if options.only in ("", each[0])]
    with tempfile.TemporaryDirectory() as folder:
        directory = options.directory or Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(
            run(options.engine, options.answers, options.seed, todo, with_network=not problem, directory=directory)
        )
    print(f"{outcomes.answers} answers, {outcomes.counts['wrong']} wrong, {outcomes.counts['hung']} hung")
    print(dict(outcomes.counts))
    print("\n".join(outcomes.wrong[:20]))
    return 1 if outcomes.counts["wrong"] or outcomes.counts["hung"] else 0


if __name__ == "__main__":
    sys.exit(main())
