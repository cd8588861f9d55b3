"""Limits and times of discovery, each with its unit and its reason."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """How a process talks to the registry."""

    # host:port, or an http:// or https:// URL. Empty: no Consul is given, and who starts the mesh serves the embedded
    # agent.
    address: str = ""
    # Sent as X-Consul-Token. A secret: it is not printed.
    token: str = field(default="", repr=False)
    # PEM files. A CA file or an https:// address turns TLS on; certificate and key are for agents that verify clients.
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    # The name to verify in the agent's certificate where it differs from the address; Consul's are `server.dc1.consul`.
    server_name: str = ""
    # One call, from the wait for a free slot to the last byte. A local agent answers in a millisecond; a leader
    # election, during which every call fails, takes Consul about 3 s.
    call_timeout_s: float = 5.0
    # What a blocking query asks Consul to wait for; Consul adds up to a sixteenth. It bounds how long a hung (not
    # dead) agent goes unnoticed, and costs one idle request per watch in that time.
    watch_wait_s: float = 30.0
    # Between two questions of one watch. A storm of changes gives at most ten views a second; a lone change is seen
    # at once.
    watch_interval_min_s: float = 0.1
    # Between failed attempts: doubles from the first to the last, less up to half at random, so that a mesh does not
    # return in step.
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
    # How long the agent waits for an instance's gRPC health answer. A worker that loads a model on all cores may take
    # seconds.
    check_timeout_s: float = 5.0
    # Short calls at once; more wait within their own timeout. Watches have connections of their own.
    calls_max: int = 32
    watches_max: int = 64
    # An answer above this is refused: a thousand instances with full meta are about 40 MB.
    answer_bytes_max: int = 64 * 1024 * 1024
    # Consul's own limit.
    value_bytes_max: int = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """How an instance keeps itself registered."""

    # Heartbeats per TTL: two may be lost before the check turns critical.
    heartbeats_per_ttl: float = 3.0
    # Signing off may not hold up a process that ends; what is left behind, the checks turn critical and the registry
    # forgets.
    close_timeout_s: float = 3.0
    # Between failed attempts, as in DiscoverySettings; never longer than the heartbeat's period.
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The embedded agent's limits. The defaults hold a thousand services in some tens of megabytes."""

    # Loopback only: the agent has no replication, and without a token anyone who reaches it may change it.
    host: str = "127.0.0.1"
    # 0 takes a free port.
    port: int = 0
    # When set, every call must carry it. A secret: it is not printed.
    token: str = field(default="", repr=False)
    # PEM files: both serve TLS; a client CA also asks clients for certificates.
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    # The CA of the instances' certificates, for gRPC checks over TLS. Empty: the system's.
    check_ca_file: str = ""
    # Shown as the node's name and the datacenter.
    node_name: str = "kvmesh-embedded"
    datacenter: str = "dc1"
    services_max: int = 4096
    checks_per_service_max: int = 8
    # Blocking queries at once; the next is refused with 429.
    watchers_max: int = 1024
    # Consul's limits for one value and for a blocking query.
    value_bytes_max: int = 512 * 1024
    wait_default_s: float = 300.0
    wait_max_s: float = 600.0
    keys_max: int = 65_536
    keys_bytes_max: int = 256 * 1024 * 1024
    sessions_max: int = 4096
    # Consul's limits for sessions.
    session_ttl_min_s: float = 10.0
    session_ttl_max_s: float = 86_400.0
    # Consul's lower bound for forgetting a critical instance: shorter ones would drop instances over a hiccup.
    deregister_after_min_s: float = 60.0
    # gRPC checks running at once.
    probes_max: int = 64
    # What a check without a timeout of its own gets, as in Consul.
    check_timeout_s: float = 10.0
    # Open requests are cut after this when the agent stops; blocking queries are answered at once.
    close_timeout_s: float = 1.0
