"""UCX's settings for TCP connections between workers, as environment variables. They are set before NIXL is imported.

Without them, a connection over a cut link stays open until TCP gives up, and a pull after the cut waits for the next retransmission: 6 s
after a cut of 20 s, and longer after a longer cut. Its blocks stay reserved for that time. With them, pulls work within 5 s of the end of
a cut (two network namespaces, tests/conformance/test_transport_cut.py).
"""

from collections.abc import Mapping

TCP_LIMITS: Mapping[str, str] = {
    # Sent data that is not acknowledged for this time ends the connection, and with it the transfer. So does a receiver that lacks the
    # CPU to read for as long. After a shorter cut TCP itself retransmits within 3.2 s.
    "UCX_TCP_USER_TIMEOUT": "5s",
    # A reader has sent its request and only waits, so its connection needs probes.
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    # A connection attempt that began during the cut does not outlast it by long.
    "UCX_TCP_SYN_CNT": "1",
    # A blocking attempt would hold the agent's thread, and with it the pulls from all other workers.
    "UCX_TCP_CONN_NB": "y",
}
