"""Limits and times of discovery, each with its unit and its reason."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """How a process talks to the registry."""

    address: str = ""
    """host:port, or an http:// or https:// URL. Empty: no Consul is given, and who starts the mesh serves the
    embedded agent."""
    token: str = field(default="", repr=False)
    """Sent as X-Consul-Token. A secret: it is not printed."""
    ca_file: str = ""
    """PEM files. A CA file or an https:// address turns TLS on; certificate and key are for agents that verify
    clients."""
    certificate_file: str = ""
    key_file: str = ""
    server_name: str = ""
    """The name to verify in the agent's certificate where it differs from the address; Consul's are
    `server.dc1.consul`."""
    call_timeout_s: float = 5.0
    """One call, from the wait for a free slot to the last byte. A local agent answers in a millisecond; a leader
    election, during which every call fails, takes Consul about 3 s."""
    watch_wait_s: float = 30.0
    """What a blocking query asks Consul to wait for; Consul adds up to a sixteenth. It bounds how long a hung (not
    dead) agent goes unnoticed, and costs one idle request per watch in that time."""
    watch_interval_min_s: float = 0.1
    """Between two questions of one watch. A storm of changes gives at most ten views a second; a lone change is
    seen at once."""
    backoff_first_s: float = 0.1
    """Between failed attempts: doubles from the first to the last, less up to half at random, so that a mesh does
    not return in step."""
    backoff_max_s: float = 5.0
    check_timeout_s: float = 5.0
    """How long the agent waits for an instance's gRPC health answer. A worker that loads a model on all cores may
    take seconds."""
    calls_max: int = 32
    """Short calls at once; more wait within their own timeout. Watches have connections of their own."""
    watches_max: int = 64
    answer_bytes_max: int = 64 * 1024 * 1024
    """An answer above this is refused: a thousand instances with full meta are about 40 MB."""
    value_bytes_max: int = 512 * 1024
    """Consul's own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """How an instance keeps itself registered."""

    heartbeats_per_ttl: float = 3.0
    """Heartbeats per TTL: two may be lost before the check turns critical."""
    close_timeout_s: float = 3.0
    """Signing off may not hold up a process that ends; what is left behind, the checks turn critical and the
    registry forgets."""
    backoff_first_s: float = 0.1
    """Between failed attempts, as in DiscoverySettings; never longer than the heartbeat's period."""
    backoff_max_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The embedded agent's limits. The defaults hold a thousand services in some tens of megabytes."""

    host: str = "127.0.0.1"
    """Loopback only: the agent has no replication, and without a token anyone who reaches it may change it."""
    port: int = 0
    """0 takes a free port."""
    token: str = field(default="", repr=False)
    """When set, every call must carry it. A secret: it is not printed."""
    certificate_file: str = ""
    """PEM files: both serve TLS; a client CA also asks clients for certificates."""
    key_file: str = ""
    client_ca_file: str = ""
    check_ca_file: str = ""
    """The CA of the instances' certificates, for gRPC checks over TLS. Empty: the system's."""
    node_name: str = "kvmesh-embedded"
    """Shown as the node's name and the datacenter."""
    datacenter: str = "dc1"
    services_max: int = 4096
    checks_per_service_max: int = 8
    watchers_max: int = 1024
    """Blocking queries at once; the next is refused with 429."""
    value_bytes_max: int = 512 * 1024
    """Consul's limits for one value and for a blocking query."""
    wait_default_s: float = 300.0
    wait_max_s: float = 600.0
    keys_max: int = 65_536
    keys_bytes_max: int = 256 * 1024 * 1024
    sessions_max: int = 4096
    session_ttl_min_s: float = 10.0
    """Consul's limits for sessions."""
    session_ttl_max_s: float = 86_400.0
    deregister_after_min_s: float = 60.0
    """Consul's lower bound for forgetting a critical instance: shorter ones would drop instances over a hiccup."""
    probes_max: int = 64
    """gRPC checks running at once."""
    check_timeout_s: float = 10.0
    """What a check without a timeout of its own gets, as in Consul."""
    close_timeout_s: float = 1.0
    """Open requests are cut after this when the agent stops; blocking queries are answered at once."""
