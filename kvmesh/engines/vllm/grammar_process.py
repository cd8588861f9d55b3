"""Compiles constraints in a separate process, to find out whether that ends: `python -m kvmesh.engines.vllm.grammar_process`.

It reads a JSON object per line: first `{"tokenizer": xgrammar's serialised TokenizerInfo}`, which it answers with `{}`, then

    {"id", "kind", "text", "cpu_s", "bytes"}    {"id", "outcome": "done" | "refused" | "stopped"}
    {"cancel": id}                              (nothing, or the answer "stopped")

Each constraint is compiled in a child of its own, which the kernel ends when it has used `cpu_s` of CPU or asks for more than `bytes` of
memory. `refused`: xgrammar does not accept the constraint; vLLM decides what that means. One constraint at a time.
"""

import json
import os
import resource
import selectors
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import xgrammar

from kvmesh.lifecycle.process import die_with_parent

DONE, REFUSED = 0, 3
OUTCOMES = {DONE: "done", REFUSED: "refused"}
"""By the exit status of the child. Any other end is `stopped`."""


def compiler_of(tokenizer: str) -> Any:
    """Returns xgrammar's compiler for a tokenizer. It uses one thread, so that the limit of CPU time also bounds the wall time."""
    info = xgrammar.TokenizerInfo.deserialize_json(tokenizer)
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compile_constraint(compiler: Any, kind: str, text: str) -> None:
    """Compiles as vLLM's backend does. Raises whatever xgrammar raises."""
    compile_kind: dict[str, Callable[[str], Any]] = {
        "json": compiler.compile_json_schema,
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }
    compile_kind[kind](text)


class Children:
    """Runs one child at a time."""

    def __init__(self, compiler: Any, reply: Callable[[dict[str, Any]], None]) -> None:
        self._compiler = compiler
        self._reply = reply
        self._pid = 0
        self._id = 0
        self.ended: IO[bytes] | None = None

    def start(self, message: dict[str, Any]) -> int:
        """Starts a child. Returns a file descriptor that is readable when the child has ended."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            self._run(message, parent)
        # Only the child has the write end from here on, so the pipe ends with the child, however that ends.
        os.close(write_end)
        self.ended = os.fdopen(read_end, "rb")
        self._id = message["id"]
        return self.ended.fileno()

    def _run(self, message: dict[str, Any], parent: int) -> NoReturn:
        status = 1
        try:
            die_with_parent(parent)
            limit_self(cpu_s=message["cpu_s"], memory_bytes=message["bytes"])
            compile_constraint(self._compiler, message["kind"], text=message["text"])
            status = DONE
        except MemoryError:
            pass
        except BaseException as error:  # noqa: BLE001 (foreign code; the process ends here)
            # xgrammar's own allocations fail with an exception of its own.
            status = 1 if "bad_alloc" in str(error) else REFUSED
        finally:
            os._exit(status)

    def cancel(self, number: int) -> None:
        if self._pid and number == self._id:
            os.kill(self._pid, signal.SIGKILL)

    def finish(self) -> None:
        """Answers for the child that has ended."""
        assert self.ended is not None
        self.ended.close()
        self.ended = None
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        outcome = OUTCOMES.get(os.WEXITSTATUS(status)) if os.WIFEXITED(status) else None
        self._reply({"id": self._id, "outcome": outcome or "stopped"})


def limit_self(cpu_s: int, memory_bytes: int) -> None:
    """Limits the resources that this process may use in addition to its current use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(out: IO[str]) -> None:
    """Runs until the input ends, as it does when the parent process ends."""

    def reply(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    lines = sys.stdin.buffer
    children = Children(compiler_of(json.loads(lines.readline())["tokenizer"]), reply)
    reply({})
    waiting: list[dict[str, Any]] = []
    # From here on the descriptor is read directly. `readline` has buffered nothing more, since the client waits for the reply above.
    os.set_blocking(lines.fileno(), False)
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(lines.fileno(), selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if children.ended is not None and children.ended.fileno() in ready:
                selector.unregister(children.ended.fileno())
                children.finish()
            if lines.fileno() in ready:
                data = os.read(lines.fileno(), 1 << 20)
                if not data:
                    return
                *whole, received = (received + data).split(b"\n")
                for line in whole:
                    message = json.loads(line)
                    if (number := message.get("cancel")) is None:
                        waiting.append(message)
                    else:
                        waiting = [each for each in waiting if each["id"] != number]
                        children.cancel(number)
            if waiting and children.ended is None:
                selector.register(children.start(waiting.pop(0)), selectors.EVENT_READ)


def main() -> int:
    # Imports may write to standard output, which carries our answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
