"""A slow path between two hosts, for kernels without netem: `python -m tests.machines.relay --device NAME --delay-s 0.05 --loss 0.01`.

Serves a TUN device: each packet that is routed to the device leaves it after the delay, in order, or is dropped.
"""

import argparse
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.chaos.hosts import Hosts, run
from tests.patience import PATIENCE_S

TUN_SET_INTERFACE = 0x400454CA
NO_PACKET_INFORMATION, TUN = 0x1000, 0x0001
PACKET_BYTES_MAX = 1 << 16
QUEUE_PACKETS_MAX = 100_000
DEVICE = "kvslow"
TABLE = "77"


def serve(device: str, *, delay_s: float, loss: float, seed: int) -> None:
    """Serves the device until the process is killed."""
    rng = random.Random(seed)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUN_SET_INTERFACE, struct.pack("16sH22x", device.encode(), TUN | NO_PACKET_INFORMATION))
    run("ip", "link", "set", device, "up")
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([tun], [], [], wait_s)[0]:
            packet = os.read(tun, PACKET_BYTES_MAX)
            if rng.random() >= loss and len(waiting) < QUEUE_PACKETS_MAX:
                waiting.append((time.monotonic() + delay_s, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tun, waiting.popleft()[1])


@contextmanager
def slow_paths(hosts: Hosts, pairs: Sequence[tuple[str, str]], *, delay_s: float, loss: float) -> Iterator[None]:
    """Delays each packet between the two hosts of a pair, in both directions, or drops it."""
    words = ("-m", "tests.machines.relay", "--device", DEVICE, "--delay-s", str(delay_s), "--loss", str(loss))
    relay = subprocess.Popen([*hosts.router, sys.executable, *words])
    added: list[tuple[str, ...]] = []
    try:
        _wait_for_device(hosts)
        run(*hosts.router, "ip", f"-{hosts.version}", "route", "add", "default", "dev", DEVICE, "table", TABLE)
        both = [pair for first, second in pairs for pair in ((first, second), (second, first))]
        for here, there in both:
            way = ("from", hosts.hosts[here].address, "to", hosts.hosts[there].address)
            # Packets from the device have been delayed already.
            for rule in (
                (*way, "iif", DEVICE, "lookup", "main", "pref", "100"),
                (*way, "lookup", TABLE, "pref", "101"),
            ):
                hosts.rule("add", *rule)
                added.append(rule)
        yield
    finally:
        for rule in reversed(added):
            hosts.rule("del", *rule)
        relay.kill()
        relay.wait()


def _wait_for_device(hosts: Hosts) -> None:
    end = time.monotonic() + PATIENCE_S
    show = [*hosts.router, "ip", "link", "show", "up", "dev", DEVICE]
    while not subprocess.run(show, capture_output=True, check=False).stdout:
        if time.monotonic() > end:
            raise RuntimeError(f"{DEVICE} does not exist after {PATIENCE_S:g} s")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--delay-s", type=float, default=0.05)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    serve(given.device, delay_s=given.delay_s, loss=given.loss, seed=given.seed)


if __name__ == "__main__":
    main()
