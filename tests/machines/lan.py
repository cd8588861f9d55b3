"""Hosts on one Ethernet, 10.0.0.1 and up, as in docs/operate/several-machines.md: namespaces with a bridge between them."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.hosts import OWN_MACHINE, Host, add_space, delete_spaces, run

NAMED = 'hostname "$0" && exec "$@"'


@contextmanager
def make_lan(count: int, directory: Path) -> Iterator[dict[int, Host]]:
    """Creates the hosts. Yields them by the last number of their address. Removes them on exit."""
    spaces: list[str] = []
    hosts: dict[int, Host] = {}
    try:
        switch = add_space("s", spaces)
        run(*switch, "ip", "link", "add", "lan", "type", "bridge")
        run(*switch, "ip", "link", "set", "lan", "up")
        for number in range(1, count + 1):
            space = add_space(str(number), spaces)
            port, card = f"kvp{os.getpid()}n{number}", "eth0"
            run(*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", card, "netns", space[-1])
            run(*switch, "ip", "link", "set", port, "master", "lan", "up")
            address = f"10.0.0.{number}"
            # Docker's bridge has the same address on every machine, so UCX must not use it to reach other hosts.
            run(*space, "ip", "link", "add", "docker0", "type", "bridge")
            run(*space, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
            run(*space, "ip", "link", "set", "docker0", "up")
            run(*space, "ip", "addr", "add", f"{address}/24", "dev", card)
            run(*space, "ip", "link", "set", card, "up")
            boot_id = directory / f"boot-id-{number}"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            alone = ("unshare", "--ipc", "--mount", "--uts", "sh", "-c", NAMED, f"host-{number}")
            prefix = (*space, *alone, "sh", "-c", OWN_MACHINE, str(boot_id))
            hosts[number] = Host(name=f"host-{number}", address=address, prefix=prefix, space=space[-1])
        yield hosts
    finally:
        for host in hosts.values():
            host.kill_all()
        delete_spaces(spaces)
