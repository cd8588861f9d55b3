"""Settings of discovery: limits and times, each with its reason."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """A process's client of the registry."""

    # The default of Consul and of `python -m kvmesh.discovery.embedded`. `kvmesh up` passes its own address.
    address: str = setting(
        "127.0.0.1:8500", "Consul agent, or an embedded one: host:port, or an http:// or https:// URL"
    )
    token: str = setting("", "ACL token, sent with every call", secret=True)
    token_file: str = setting("", "file with the ACL token, instead of `token`; read when the process starts")
    # Consul's own agent has no certificate of the mesh unless it is given one, and its checks then fail.
    checks_tls: bool = setting(
        False,
        "the agent has a certificate of the mesh for its checks (Consul: enable_agent_tls_for_checks), so it checks gRPC health over"
        " mesh TLS too; no: with mesh TLS, heartbeats alone show that a service is alive",
    )
    ca_file: str = setting("", "PEM file with the agent's CA; turns TLS on; empty with https://: the system's CAs")
    certificate_file: str = setting("", "PEM file with our certificate, for agents that verify clients")
    key_file: str = setting("", "PEM file with our certificate's key")
    # Consul's own certificates say server.dc1.consul.
    server_name: str = setting("", "name to verify in the agent's certificate, where it is not the address")
    # A local agent answers in a millisecond; a leader election, during which calls fail, takes Consul about 3 s.
    call_timeout_s: float = internal(5.0, "one call, from the wait for a free slot to the last byte")
    # It bounds the time until a hung (not dead) agent is noticed. Each watch makes an idle request per interval.
    watch_wait_s: float = internal(30.0, "how long a blocking query waits for a change")
    # Frequent changes produce at most ten views a second; a single change is visible immediately.
    watch_interval_min_s: float = internal(0.1, "shortest time between two queries of a watch")
    # Delays double from the first to the longest. A random part, at most half, is subtracted, so that clients spread out.
    backoff_first_s: float = internal(0.1, "delay after a watch's first failure")
    backoff_max_s: float = internal(5.0, "longest delay between a watch's attempts")
    calls_max: int = internal(32, "concurrent calls; more wait within their own timeout")
    watches_max: int = internal(64, "open watches; each has its own connection")
    # A thousand instances with full meta are about 40 MB.
    answer_bytes_max: int = internal(64 * 1024 * 1024, "largest accepted response")


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """How an instance stays registered."""

    # With three, the check survives two lost heartbeats.
    heartbeats_per_ttl: float = internal(3.0, "heartbeats per TTL")
    attempt_timeout_s: float = internal(10.0, "time limit of all calls of one attempt together")
    # An instance that stays registered turns critical by its checks, and the registry removes it later.
    close_timeout_s: float = internal(3.0, "longest deregistration when a process ends")
    # As in DiscoverySettings. A delay is never longer than the time between heartbeats.
    backoff_first_s: float = internal(0.1, "delay after the first failed heartbeat")
    backoff_max_s: float = internal(5.0, "longest delay between attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The embedded agent. The defaults hold a thousand services in some tens of megabytes."""

    # Without a token, anyone who can connect to the agent can change its state.
    host: str = setting("127.0.0.1", "address to serve on")
    port: int = setting(0, "port to serve on; 0: any free one", min=0, max=65_535)
    token: str = setting("", "when set, every call must carry it", secret=True)
    certificate_file: str = setting("", "PEM file with a certificate; turns TLS on")
    key_file: str = setting("", "PEM file with the certificate's key")
    client_ca_file: str = setting("", "PEM file with a CA; clients must then show a certificate of it")
    check_tls_directory: str = setting("", "folder with tls.crt, tls.key and ca.crt for checks of the mesh's services")
    node_name: str = internal("kvmesh-embedded", "name of the agent's only node")
    services_max: int = setting(4096, "most instances; more are refused with 429", min=1)
    watchers_max: int = internal(1024, "concurrent blocking queries; more are refused with 429")
    keys_max: int = internal(65_536, "most keys; more are refused with 429")
    keys_bytes_max: int = internal(256 * 1024 * 1024, "total bytes of keys and values")
    sessions_max: int = internal(4096, "most sessions; more are refused with 429")
    probes_max: int = internal(64, "concurrent gRPC checks")
    # Blocking queries are answered immediately when the agent stops.
    close_timeout_s: float = internal(1.0, "longest wait for open requests when the agent stops")
