"""Settings of the frontend, each with its unit and reason."""

from dataclasses import dataclass, field, replace

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import UnsupportedError
from kvmesh.identity.settings import MeshSettings
from kvmesh.lifecycle import LifecycleSettings
from kvmesh.network.settings import NetworkSettings
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.settings import PublicRpcSettings
from kvmesh.settings import internal, setting
from kvmesh.telemetry import TelemetrySettings
from services.frontend.access.settings import AccessSettings
from services.frontend.parser_process.process import check_installed
from services.frontend.parsers.select import ParserNames
from services.frontend.stores.url import check_url


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP server."""

    host: str = setting("", "Address that the HTTP API listens on; empty: the value of `address`.")
    port: int = setting(8000, "Port of the HTTP API; 0: a free one.", min=0, max=65535)
    shares_port: bool = internal(
        False,
        "Whether other processes listen on the port too and the kernel spreads connections; see `shared_port.py`.",
    )
    body_bytes_max: int = setting(8 << 20, "Largest request body; a million tokens of text is about 5 MB.", min=1024)
    body_timeout_s: float = setting(30.0, "Longest wait for a request's body.", min=0.1)
    bodies_bytes_max: int = setting(
        256 << 20,
        "Request bodies above 64 KiB that wait to be parsed, all together; four times as much may arrive. One tenant may hold a quarter.",
        min=32 << 20,
    )
    head_timeout_s: float = setting(10.0, "Longest wait for a request's line and headers.", min=0.1)
    idle_timeout_s: float = setting(
        620.0,
        "Time after which a connection without a request is closed; longer than load balancers keep theirs.",
        min=1,
    )
    connections_max: int = setting(8192, "Most connections; further ones are closed immediately.", min=1)
    hosts: tuple[str, ...] = setting(
        (),
        "Names of this server in the Host header, such as api.example. Empty: on loopback the names of loopback, else any.",
    )
    keep_alive_s: float = setting(
        15.0, "Time without data after which a stream gets a comment, so that proxies keep it open. 0: none.", min=0
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose pages may send requests from a browser, such as https://app.example; `*`: all. Empty: none."
    )
    tls_certificate_file: str = setting("", "PEM certificate chain of the HTTP API. Empty: no TLS.")
    tls_key_file: str = setting("", "PEM key of the certificate.")
    tls_authority_file: str = setting(
        "",
        "PEM certificates of the authorities that sign client certificates (mTLS). Empty: clients need no certificate.",
    )
    model_is_optional: bool = setting(
        True, "Whether a request may omit `model` if exactly one model is served, as with vLLM."
    )
    refuses_unknown_fields: bool = setting(
        False,
        "Whether to refuse fields of request bodies that no API declares. Otherwise they are ignored, and named in X-Kvmesh-Warning.",
    )
    allows_pins: bool = setting(
        False,
        "Whether requests may have x-kvmesh-pin-prefill, -pin-decode, x-kvmesh-labels and -preferred-labels; else they are refused.",
    )
    stalled_client_timeout_s: float = setting(
        30.0,
        "Time after which the connection of a client that reads nothing of a waiting answer is closed.",
        min=0.1,
    )

    def __post_init__(self) -> None:
        """Raises ValueError for TLS files that do not go together."""
        if bool(self.tls_certificate_file) != bool(self.tls_key_file):
            raise ValueError("tls_certificate_file and tls_key_file are given together or not at all")
        if self.tls_authority_file and not self.tls_certificate_file:
            raise ValueError("tls_authority_file needs tls_certificate_file and tls_key_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class UiSettings:
    """The page /ui."""

    is_on: bool = setting(
        True, "Whether to serve /ui, which shows the mesh. Where API keys are on, it needs one with `operator`."
    )
    allows_public: bool = setting(
        False,
        "Whether to serve /ui on an address other than loopback, and to requests that a proxy forwards. Without API keys everybody "
        "who reaches the address then sees the mesh.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Limits of uploaded files and of the batches made of them."""

    is_on: bool = setting(True, "Whether to accept files and run batches.")
    directory: str = setting("", "Directory of the files and the database; empty: `batches` in the state directory.")
    file_bytes_max: int = setting(200 << 20, "Largest uploaded file, as OpenAI's.", min=1024)
    files_bytes_max: int = setting(10 << 30, "Bytes of all stored files.", min=1024)
    files_max: int = setting(10_000, "Number of stored files.", min=1)
    file_ttl_s: float = setting(
        30 * 86_400.0, "Longest time for which a file is stored, and the default; 30 days.", min=1
    )
    batches_max: int = setting(10_000, "Number of stored batches, including those that have ended.", min=1)
    batch_ttl_s: float = setting(30 * 86_400.0, "Time for which a batch is stored after its end; 30 days.", min=1)
    lines_max: int = setting(50_000, "Requests in one batch, as OpenAI's.", min=1)
    line_bytes_max: int = setting(4 << 20, "Longest line of an input file.", min=256)
    running_max: int = setting(4, "Batches that one frontend runs at the same time.", min=1)
    lines_in_flight_max: int = setting(16, "Requests of batches in flight on one frontend.", min=1)
    priority: int = setting(
        -100, "Priority of a batch's requests; requests with larger values run first.", min=-100, max=100
    )
    retry_s_max: float = internal(10.0, "Longest pause before the retry of a request that was refused for load.")
    lease_s: float = setting(
        15.0,
        "Time after which another frontend takes over the batch of a frontend that does not renew its lease.",
        min=0.3,
    )
    poll_s: float = internal(2.0, "Pause between two searches for batches to run.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcApiSettings:
    """Limits of the gRPC APIs for clients."""

    request_bytes_max: int = setting(8 << 20, "Largest request, as over HTTP.", min=1024, max=(1 << 31) - 1)
    streams_max: int = setting(256, "Calls at a time on one connection; clients hold back more.", min=1)
    connections_max: int = setting(8192, "Most connections, as over HTTP; more are closed at once.", min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSettings:
    """The store of responses."""

    is_on: bool = setting(True, "Whether to store responses; off: a request with `store` true is refused.")
    path: str = setting("", "SQLite file of stored responses; empty: responses.sqlite in the state directory.")
    stores_by_default: bool = setting(True, "Whether a request without `store` is stored, as with OpenAI.")
    ttl_s: float = setting(30 * 86_400.0, "Time for which an unused response is stored; 30 days.", min=1)
    stored_bytes_max: int = setting(
        1 << 30, "Bytes of stored responses; the least recently used are deleted first.", min=1024
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeSettings:
    """Prompts that are sent to a second prefill worker (sequential handoff)."""

    share_max: float = setting(
        0.0,
        "Largest part of the requests whose prompt a second prefill worker computes, when the first one takes longer than nearly all"
        " others did. 0: none. 0.02 cuts the slowest answers for two hundredths of the prefill work.",
        min=0,
        max=0.5,
    )
    quantile: float = setting(
        0.95, "Part of the prompts that are not hedged, by how late they are.", min=0.5, max=0.999
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresSettings:
    """The database that frontends on several machines share."""

    url: str = setting(
        "",
        "PostgreSQL database of responses, files and batches, such as postgresql://kvmesh@10.0.0.5/kvmesh?sslmode=verify-full, without "
        "a password. Empty: SQLite in the state directory.",
    )
    password_file: str = setting(
        "", "File with the password, read for each new connection. Empty: PGPASSWORD, else the entry in PGPASSFILE."
    )
    connections_max: int = setting(8, "Connections of one frontend process to the database.", min=1, max=1000)
    timeout_s: float = setting(5.0, "Longest duration of one call of the database, waiting included.", min=0.1)

    def __post_init__(self) -> None:
        """Raises ValueError for a URL that cannot be used."""
        check_url(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Limits of requests."""

    requests_max: int = setting(4096, "Most requests in flight; more are refused with Retry-After.", min=1)
    tenant_share_max: float = setting(0.5, "Largest part of requests_max of one tenant.", min=0.01, max=1)
    choices_max: int = setting(16, "Most choices (n) of one prompt.", min=1, max=128)
    prompts_max: int = setting(64, "Most prompts of one completion request.", min=1)
    request_timeout_s: float = setting(600.0, "Longest duration of a request; clients may set a shorter one.", min=0.1)
    first_token_timeout_s: float = setting(300.0, "Longest wait for the first token.", min=0.1)
    idle_timeout_s: float = setting(60.0, "Longest time between two tokens of a request.", min=0.1)
    place_timeout_s: float = setting(
        10.0,
        "Longest wait for a router, except in its queue; also the longest wait for a worker that replaces a lost one.",
        min=0.01,
    )
    unread_timeout_s: float = setting(
        30.0,
        "Longest time in which a gRPC client takes nothing of an answer that waits for it; then its call ends with CANCELLED.",
        min=0.1,
    )
    placement_attempts: int = setting(
        3,
        "Placements of one request, without a token between them, that may end with a refusal or with lost KV; the last one ends the "
        "request.",
        min=1,
        max=16,
    )
    continuations_max: int = setting(
        8,
        "Times that an answer is continued on another worker after its worker was lost. 0: an answer that the client has begun to "
        "receive ends with the error.",
        min=0,
        max=64,
    )
    continuation_age_s_max: float = setting(
        0.0, "Age of a request after which its answer is not continued. 0: no limit but that of the request.", min=0
    )
    continuation_tokens_max: int = setting(
        0,
        "Tokens of prompt and answer above which an answer is not continued, since another worker would compute all of them. 0: no limit.",
        min=0,
    )
    hedge: HedgeSettings = field(default_factory=HedgeSettings)
    drain_notice_s: float = setting(
        0.0,
        "Time for which a stopping frontend reports not ready before it refuses requests; for slow load balancers.",
        min=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Tokenizers, chat templates and parsers of the served models."""

    cache_dir: str = setting("", "Hugging Face cache of models that are not a directory; empty: its default.")
    files_dir: str = setting(
        "",
        "Directory for tokenizers, templates and configurations that workers send; empty: $XDG_CACHE_HOME/kvmesh/model-files, "
        "else ~/.cache/kvmesh/model-files.",
    )
    file_sets_max: int = setting(
        16, "Models of which files_dir keeps the files; the least recently loaded are deleted first.", min=1
    )
    fetch_timeout_s: float = setting(60.0, "Longest time in which a worker sends a model's files.", min=0.1)
    fast_tokenizer: bool = setting(
        True,
        "Whether fastokens tokenises prompts of models for which it gives the same tokens; it takes a tenth of the time.",
    )
    cached_characters_max: int = setting(
        2_000_000,
        "Characters of earlier prompts whose tokens are cached, for each model; about 15 bytes each. 0: none.",
        min=0,
    )
    parser_process_answers_max: int = setting(
        512,
        "Answers that one process with vLLM's parsers parses at a time (`tool_parser`); more are refused with Retry-After.",
        min=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings(NetworkSettings):
    """A frontend process."""

    instance_id: str = setting("", "Registered id; empty: host name and process id.")
    processes: int = setting(
        1, "Processes that share the HTTP port; set one per core that the frontend may use.", min=1, max=256
    )
    tool_parser: str = setting(
        "auto",
        "How tool calls are parsed: a family, auto (by the model's chat template and tokens), none, or vllm:NAME "
        "(vLLM's parser, in a separate process); for several models MODEL=FAMILY,MODEL=FAMILY.",
    )
    reasoning_parser: str = setting("auto", "How reasoning is parsed; values as for tool_parser.")
    http: HttpSettings = field(default_factory=HttpSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    ui: UiSettings = field(default_factory=UiSettings)
    state_dir: str = setting(
        "",
        "Directory of stored responses, files and batches; empty: $XDG_STATE_HOME/kvmesh, else ~/.local/state/kvmesh.",
    )
    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    stores: StoresSettings = field(default_factory=StoresSettings)
    kserve_is_on: bool = setting(True, "Whether to serve GRPCInferenceService (KServe v2).")
    rpc: PublicRpcSettings = field(default_factory=PublicRpcSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    grpc_api: GrpcApiSettings = field(default_factory=GrpcApiSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    router: RouterLinkSettings = field(default_factory=RouterLinkSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)

    def __post_init__(self) -> None:
        """Raises ValueError for parsers that do not exist."""
        NetworkSettings.__post_init__(self)
        try:
            self.parser_names.check()
            if self.parser_names.needs_vllm:
                check_installed()
        except UnsupportedError as error:
            raise ValueError(f"{error.field}: {error.message}") from error

    @property
    def server_rpc(self) -> PublicRpcSettings:
        """The settings of the gRPC server, whose clients are not services of the mesh."""
        api = self.grpc_api
        return replace(
            self.rpc,
            request_bytes_max=api.request_bytes_max,
            streams_max=api.streams_max,
            connections_max=api.connections_max,
        )

    @property
    def parser_names(self) -> ParserNames:
        """The settings of parsers."""
        return ParserNames(tools=self.tool_parser, reasoning=self.reasoning_parser)
