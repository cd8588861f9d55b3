"""Runs the commands of docs/operate/several-machines.md, line by line, on hosts with the addresses in the page.

The tests only replace paths: of the model, of Consul's files, of the keys' files, and of the virtual environment.
"""

import asyncio
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos.hosts import Host
from tests.integration.mesh import ROOT
from tests.machines.lan import make_lan
from tests.machines.mesh import READY_S, require_hosts
from tests.machines.traffic import MODEL, SimulatedQuestions
from tests.parts import require_part
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(400)
PAGE = ROOT / "docs" / "operate" / "several-machines.md"
KEY = "a key of this test"
FETCH = ".venv/bin/python -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())'"
COMPLETE = """
import sys, urllib.request
url, body, key = sys.argv[1:]
headers = {"content-type": "application/json", "x-api-key": key}
print(urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body.encode(), headers)).read().decode())
"""


def block(section: str, page: Path = PAGE) -> str:
    """Returns the commands of a section."""
    found = re.search(rf"^##+ {section}$.*?^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, section
    return found[1]


def parts(commands: str) -> dict[str, str]:
    """Returns the commands under each comment."""
    found = re.split(r"^# (.*)\n", commands, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def numbers(comment: str) -> list[int]:
    """Returns the hosts in a comment: `10.0.0.1 to 10.0.0.3`, `10.0.0.1 and 10.0.0.2`, `10.0.0.3`."""
    found = [int(each) for each in re.findall(r"10\.0\.0\.(\d+)", comment)]
    return list(range(found[0], found[1] + 1)) if " to " in comment else found


@dataclass(slots=True, kw_only=True)
class Operator:
    """Runs commands on hosts, as an operator types them."""

    hosts: Mapping[int, Host]
    directory: Path
    exports: str = ""
    """Commands that precede all others on each host. {number} is the host's number."""
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def _text(self, number: int, commands: str) -> str:
        """Replaces the page's paths by those of this test."""
        own = self.directory / f"host-{number}"
        commands = self.exports.replace("{number}", str(number)) + commands
        for name, path in {
            "compose/prometheus/prometheus.yml": str(own / "prometheus.yml"),
            "/var/lib/prometheus": str(own / "prometheus-data"),
            "/models/my-llama": str(self.directory / "my-llama"),
            "/var/lib/consul": str(own / "consul-data"),
            "/etc/consul": str(own),
            "/etc/kvmesh": str(own),
            ".venv/bin": str(Path(sys.prefix) / "bin"),
        }.items():
            commands = commands.replace(name, path)
        return commands

    async def start(self, number: int, commands: str) -> None:
        """Runs commands in the background, with simulated engines instead of vLLM, the default engine."""
        commands = f"export KVMESH_ENGINE=simulated\n{commands}"
        with (self.directory / f"host-{number}.log").open("ab") as log:
            self.processes.append(await self._run(number, f"{commands}\nwait", log.fileno()))

    async def type(self, number: int, commands: str) -> str:
        """Runs a command and returns its output. Raises AssertionError if it fails."""
        process = await self._run(number, commands, asyncio.subprocess.PIPE)
        # Not PATIENCE_S: the doctor uses seconds of CPU time.
        output, _ = await asyncio.wait_for(process.communicate(), READY_S)
        assert process.returncode == 0, output.decode()
        return output.decode()

    async def until(self, number: int, commands: str, is_good: Callable[[str], bool] = bool) -> str:
        """Repeats a command until it succeeds. Raises AssertionError with its last output and the ends of the logs."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + READY_S
        while True:
            try:
                output = await self.type(number, commands)
                assert is_good(output), output
                return output
            except AssertionError as error:
                if loop.time() > until_s:
                    raise AssertionError(f"{error}\n{self.logs()}") from None
            await asyncio.sleep(0.5)

    def logs(self) -> str:
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    async def _run(self, number: int, commands: str, output: int) -> asyncio.subprocess.Process:
        own = self.directory / f"host-{number}"
        own.mkdir(exist_ok=True)
        binaries = {str(require_part(part).parent) for part in ("consul", "prometheus")}
        homes = {f"XDG_{name}_HOME": str(own / name.lower()) for name in ("CACHE", "STATE")}
        return await asyncio.create_subprocess_exec(
            *(*self.hosts[number].prefix, "bash", "-c", self._text(number, commands)),
            cwd=ROOT,
            env={
                **os.environ,
                **homes,
                "PATH": ":".join((*binaries, os.environ["PATH"])),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )


@asynccontextmanager
async def operator(count: int, directory: Path) -> AsyncIterator[Operator]:
    require_part("nixl")
    require_hosts()
    (directory / "my-llama").symlink_to(MODEL)
    with make_lan(count, directory) as hosts:
        found = Operator(hosts=hosts, directory=directory)
        yield found
    for process in found.processes:
        await asyncio.wait_for(process.wait(), PATIENCE_S)


async def check_answers(typist: Operator, number: int, url: str, *, times: int = 4) -> None:
    """Checks that a client on one of the hosts gets right answers."""
    questions = SimulatedQuestions()
    for _ in range(times):
        question = questions.next()
        body = {
            "model": "my-llama",
            "prompt": question.prompt,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        text = await typist.type(number, shlex.join((".venv/bin/python", "-c", COMPLETE, url, json.dumps(body), KEY)))
        assert json.loads(text)["choices"][0]["token_ids"] == list(question.answer)


async def test_two_hosts(tmp_path: Path) -> None:
    """With only the commands of the page, the doctor reports no problem, and answers are right."""
    typed = parts(block("Two hosts"))
    async with operator(2, tmp_path) as typist:
        await share_credentials(typist)
        await typist.start(1, typed["Host A"])
        await typist.start(2, typed["Host B"])
        *inspect, curl = typed["Anywhere in the network"].strip().splitlines()
        # The shell of host B, which has the exported variables.
        typist.exports = "\n".join(line for line in typed["Host B"].splitlines() if line.startswith("export")) + "\n"
        await typist.until(2, curl + " --fail | grep my-llama")
        await typist.until(2, inspect[0], is_healthy(pairs=1))
        await typist.until(2, inspect[1], lambda shown: "warning" not in shown)
        await check_answers(typist, 2, "http://10.0.0.1:8000")


async def test_one_command_and_a_worker_that_joins(tmp_path: Path) -> None:
    """With certificates on all services, a worker on another host joins a mesh of `kvmesh up`."""
    consul = parts(block("Two hosts"))["Host A"].splitlines()[0]
    typed = list(parts(block("With one command and certificates")).values())
    async with operator(2, tmp_path) as typist:
        await typist.start(1, consul)
        make_credentials, up = typed[0].strip().splitlines()
        await typist.type(1, make_credentials)
        for name in ("mesh-secret", "tls/decode"):
            target = tmp_path / "host-2" / name
            await typist.type(1, f"mkdir -p {target.parent} && cp -r {tmp_path / 'host-1' / name} {target}")
        await typist.until(1, "curl --fail http://10.0.0.1:8500/v1/status/leader | grep 8300")
        await typist.start(1, up)
        await typist.start(2, typed[1])
        inspect, status = typed[2].strip().splitlines()
        # `kvmesh up` also starts a prefill and a decode worker.
        await typist.until(1, "curl --fail http://10.0.0.1:8000/health")
        await typist.until(1, inspect, is_healthy(pairs=2))
        await typist.until(1, status, lambda shown: "warning" not in shown)
        await check_answers(typist, 2, "http://10.0.0.1:8000")


async def share_credentials(typist: Operator) -> None:
    """Creates credentials on host 1 and copies them to the other hosts without the authority's key."""
    await typist.type(1, ".venv/bin/kvmesh credentials /etc/kvmesh/credentials")
    made = typist.directory / "host-1" / "credentials"
    for number in typist.hosts:
        if number != 1:
            copy = typist.directory / f"host-{number}"
            await typist.type(number, f"cp -r {made} {copy} && rm {copy}/credentials/ca.key")


def is_healthy(*, pairs: int) -> Callable[[str], bool]:
    """Returns a check of a doctor's report: this many pairs transfer KV, and the report has no warning and no failure."""
    return lambda report: (
        len(re.findall(r"KV transfer +ok", report)) == pairs
        and re.search(r"warning|failed|skipped|unknown", report) is None
    )


def acl_file() -> str:
    """Returns the command that writes Consul's configuration on each host."""
    commands = block("Consul in production")
    return commands[: commands.index("END\n", commands.index("END") + 5)] + "END\n"


async def make_tokens(typist: Operator) -> tuple[str, str]:
    """Creates a token for each agent. Returns the tokens of the services and of Prometheus.

    Repeats commands that fail, because slow servers elect another leader.
    """
    commands = block("Consul in production").removeprefix(acl_file()).splitlines()
    lines = [line.partition("  #")[0].strip() for line in commands]
    bootstrap, agent_token, set_agent_token, policy, token, prometheus_policy, prometheus_token = lines
    exports = typist.exports
    typist.exports += f"export CONSUL_HTTP_TOKEN={secret(await typist.until(1, bootstrap))}\n"
    for number in typist.hosts:
        own = secret(await typist.until(1, agent_token.replace("host-4", f"host-{number}")))
        await typist.until(number, set_agent_token.replace("SECRET_ID", own))
    await typist.until(1, policy)
    await typist.until(1, prometheus_policy)
    found = secret(await typist.until(1, token)), secret(await typist.until(1, prometheus_token))
    typist.exports = exports
    return found


def secret(printed: str) -> str:
    found = re.search(r"SecretID: +(\S+)", printed)
    assert found is not None, printed
    return found[1]


def add_files(directory: Path, prometheus_token: str) -> None:
    """Writes the frontends' keys, and Prometheus's configuration with its token."""
    keys = [{"tenant": "acme", "key_sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
    for number in (1, 2):
        (directory / f"host-{number}" / "keys.json").write_text(json.dumps({"keys": keys}))
    folder = ROOT / "compose" / "prometheus"
    for name in ("prometheus.yml", "alerts.yml"):
        (directory / "host-3" / name).write_text((folder / name).read_text())
    config = directory / "host-3" / "prometheus.yml"
    server = '      - server: "127.0.0.1:8500"\n'
    assert server in config.read_text()
    config.write_text(config.read_text().replace(server, f'{server}        token: "{prometheus_token}"\n'))


async def test_ten_hosts(tmp_path: Path) -> None:
    """The commands set up a mesh with access control: three Consul servers, an agent on each host, one token per agent and one for all
    services."""
    typed = parts(block("Ten hosts"))
    [exports] = [text for comment, text in typed.items() if comment.startswith("On every host")]
    runs = [(comment, text) for comment, text in typed.items() if numbers(comment)]
    async with operator(10, tmp_path) as typist:
        typist.exports = exports.replace("10.0.0.4", "10.0.0.{number}")
        for number in typist.hosts:
            await typist.type(number, acl_file())
        for comment, text in runs:
            if text.startswith("consul agent"):
                for number in numbers(comment):
                    await typist.start(number, text)
        token, prometheus_token = await make_tokens(typist)
        await share_credentials(typist)
        for number in typist.hosts:
            (tmp_path / f"host-{number}" / "credentials" / "registry-token").write_text(token)
        add_files(tmp_path, prometheus_token)
        for comment, text in runs:
            if not text.startswith("consul agent"):
                groups = comment.split(", then ")
                texts = [text] if len(groups) == 1 else text.strip().splitlines()
                for group, commands in zip(groups, texts, strict=True):
                    for number in numbers(group):
                        await typist.start(number, commands)
        # The doctor uses seconds of CPU time, which the services need while they start.
        for number in (1, 2):
            await typist.until(10, f"curl --fail http://10.0.0.{number}:8000/health")
        await typist.until(10, typed["Any host"], is_healthy(pairs=12))
        for number in (1, 2):
            await check_answers(typist, 10, f"http://10.0.0.{number}:8000", times=2)
        await typist.until(1, f"{FETCH} 'http://10.0.0.3:9090/api/v1/query?query=sum(up)' | grep -F '\"12\"'")
