"""Limits and times of discovery, each with its reason."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """How a process talks to the registry."""

    # Where Consul listens by default, and `python -m kvmesh.discovery.embedded`; `kvmesh up` hands on its own address.
    address: str = setting(
        "127.0.0.1:8500", "Consul agent, or an embedded one: host:port, or an http:// or https:// URL"
    )
    token: str = setting("", "ACL token, sent with every call", secret=True)
    ca_file: str = setting("", "PEM file with the agent's CA; turns TLS on; empty with https://: the system's CAs")
    certificate_file: str = setting("", "PEM file with our certificate, for agents that verify clients")
    key_file: str = setting("", "PEM file with our certificate's key")
    # Consul's own certificates say server.dc1.consul.
    server_name: str = setting("", "name to verify in the agent's certificate, where it is not the address")
    # A local agent answers in a millisecond; a leader election, during which calls fail, takes Consul about 3 s.
    call_timeout_s: float = setting(5.0, "one call, from the wait for a free slot to the last byte", min=0.01, max=600)
    # It bounds how long a hung (not dead) agent goes unnoticed, and costs an idle request per watch in that time.
    watch_wait_s: float = internal(30.0, "how long a blocking query waits for a change")
    # A storm of changes gives at most ten views a second; a lone change is seen at once.
    watch_interval_min_s: float = internal(0.1, "least time between two questions of one watch")
    # Delays double from the first to the last, less up to half at random, so that a mesh does not come back in step.
    backoff_first_s: float = internal(0.1, "delay after a watch's first failure")
    backoff_max_s: float = internal(5.0, "longest delay between a watch's attempts")
    # A worker that loads a model on all cores may take seconds to answer.
    check_timeout_s: float = setting(5.0, "how long the agent waits for an instance's gRPC health", min=0.01, max=600)
    calls_max: int = internal(32, "calls in flight at once; more wait within their own timeout")
    watches_max: int = internal(64, "watches open at once; each has a connection of its own")
    # A thousand instances with full meta are about 40 MB.
    answer_bytes_max: int = internal(64 * 1024 * 1024, "largest answer taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """How an instance keeps itself registered."""

    # With three, two may be lost before the check turns critical.
    heartbeats_per_ttl: float = internal(3.0, "heartbeats sent in the time after which they are missed")
    attempt_timeout_s: float = internal(10.0, "all calls that bring the registry up to date, together")
    # What is left behind turns critical by its checks, and the registry forgets it in time.
    close_timeout_s: float = internal(3.0, "how long signing off may hold up a process that ends")
    # As in DiscoverySettings; a delay is never longer than the time between heartbeats.
    backoff_first_s: float = internal(0.1, "delay after the first failed heartbeat")
    backoff_max_s: float = internal(5.0, "longest delay between attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The embedded agent. The defaults hold a thousand services in some tens of megabytes."""

    # The agent has no replication, and without a token anyone who reaches it may change it.
    host: str = setting("127.0.0.1", "address to serve on")
    port: int = setting(0, "port to serve on; 0: any free one", min=0, max=65_535)
    token: str = setting("", "when set, every call must carry it", secret=True)
    certificate_file: str = setting("", "PEM file with a certificate; turns TLS on")
    key_file: str = setting("", "PEM file with the certificate's key")
    client_ca_file: str = setting("", "PEM file with a CA; clients must then show a certificate of it")
    check_ca_file: str = setting("", "PEM file with the CA of instances' gRPC servers; empty: the system's CAs")
    node_name: str = internal("kvmesh-embedded", "name of the one node there is")
    datacenter: str = internal("dc1", "name of the one datacenter there is")
    services_max: int = setting(4096, "instances held; the next is refused with 429", min=1)
    checks_per_service_max: int = internal(8, "checks of one instance")
    watchers_max: int = internal(1024, "blocking queries at once; the next is refused with 429")
    # Consul's limits.
    wait_default_s: float = internal(300.0, "how long a blocking query waits that does not say")
    wait_max_s: float = internal(600.0, "longest wait of a blocking query")
    keys_max: int = internal(65_536, "keys held; the next is refused with 429")
    keys_bytes_max: int = internal(256 * 1024 * 1024, "keys and values together")
    sessions_max: int = internal(4096, "sessions held; the next is refused with 429")
    # Consul's limits.
    session_ttl_min_s: float = internal(10.0, "shortest TTL of a session")
    session_ttl_max_s: float = internal(86_400.0, "longest TTL of a session")
    # Consul's lower bound: with a shorter one a hiccup would drop instances.
    deregister_after_min_s: float = internal(60.0, "shortest time after which a critical instance is forgotten")
    probes_max: int = internal(64, "gRPC checks asking at once")
    # Consul's default.
    check_timeout_s: float = internal(10.0, "timeout of a gRPC check that does not say")
    # Blocking queries are answered at once then.
    close_timeout_s: float = internal(1.0, "how long open requests may go on when the agent stops")
