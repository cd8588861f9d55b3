"""Settings of the frontend, each with its unit and reason."""

from dataclasses import dataclass, field

from kvmesh.discovery.settings import DiscoverySettings
from kvmesh.errors import UnsupportedError
from kvmesh.lifecycle import LifecycleSettings, SupervisorSettings
from kvmesh.rpc.paced import DEFAULT_PACE_S
from kvmesh.rpc.router_link_settings import RouterLinkSettings
from kvmesh.rpc.settings import RpcSettings
from kvmesh.settings import setting
from kvmesh.telemetry import TelemetrySettings
from services.frontend.access.settings import AccessSettings
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.kserve.settings import KserveSettings
from services.frontend.api.responses.settings import ResponsesSettings
from services.frontend.parser_process.process import ParserProcessSettings, check_installed
from services.frontend.parsers.select import ParserNames
from services.frontend.text.sandbox import TemplateLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The OpenAI side."""

    host: str = setting("127.0.0.1", "Address the HTTP API listens on.")
    port: int = setting(8000, "Port of the HTTP API; 0: a free one.", min=0, max=65535)
    shares_port: bool = setting(
        False, "Whether other processes listen on the port too and the kernel spreads connections; see `processes`."
    )
    share_after_s: float = setting(
        10.0,
        "Longest wait for a model before a process joins a shared port: until then it would only refuse what others can answer.",
        min=0,
    )
    body_bytes_max: int = setting(8 << 20, "Largest request body; a million tokens of text is about 5 MB.", min=1024)
    header_bytes_max: int = setting(8190, "Longest request line and longest header.", min=256, max=65536)
    headers_max: int = setting(128, "Most headers.", min=8, max=1024)
    body_timeout_s: float = setting(30.0, "Longest wait for a request's body.", min=0.1)
    backlog: int = setting(1024, "Connections waiting to be accepted.", min=1)
    stream_buffer_bytes_max: int = setting(
        65_536, "Unsent bytes of one stream after which tokens are merged instead of written one by one.", min=1024
    )
    detailed_events_per_s_max: int = setting(
        5_000,
        "Events per second with log-probabilities or token ids, of all streams together; above it tokens share events.",
        min=100,
    )
    keep_alive_s: float = setting(
        15.0, "Silence in a stream after which a comment is sent, so that proxies keep it open. 0: none.", min=0
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origins whose pages may ask from a browser, such as https://app.example; `*`: all. None: no page may."
    )
    cors_age_s: float = setting(600.0, "How long browsers remember what is allowed.", min=0)
    tls_certificate_file: str = setting("", "PEM certificate chain of the HTTP API. Empty: no TLS.")
    tls_key_file: str = setting("", "PEM key of the certificate.")
    tls_authority_file: str = setting(
        "", "PEM certificates that clients must be signed by (mTLS). Empty: clients show none."
    )
    model_is_optional: bool = setting(
        True, "Whether a request may leave `model` out where exactly one model is served, as with vLLM."
    )
    allows_pins: bool = setting(
        False,
        "Whether x-kvmesh-pin-prefill, -pin-decode, x-kvmesh-labels and -preferred-labels are obeyed; else they are refused.",
    )
    stalled_client_timeout_s: float = setting(
        30.0, "Longest wait for a client to read the end of its answer; then it is cut off.", min=0.1
    )

    def __post_init__(self) -> None:
        """Certificate and key go together, and an authority needs both."""
        if bool(self.tls_certificate_file) != bool(self.tls_key_file):
            raise ValueError("tls_certificate_file and tls_key_file are given together or not at all")
        if self.tls_authority_file and not self.tls_certificate_file:
            raise ValueError("tls_authority_file needs tls_certificate_file and tls_key_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Limits of one request's way through the mesh."""

    requests_max: int = setting(4096, "Requests in flight; more are refused with Retry-After.", min=1)
    choices_max: int = setting(16, "Choices (n) of one prompt.", min=1, max=128)
    prompts_max: int = setting(64, "Prompts of one completion request.", min=1)
    embed_inputs_max: int = setting(2048, "Inputs of one embedding request; OpenAI takes as many.", min=1, max=2048)
    request_timeout_s: float = setting(600.0, "Longest life of a request; clients may ask for less.", min=0.1)
    first_token_timeout_s: float = setting(300.0, "Longest wait for the first token.", min=0.1)
    idle_timeout_s: float = setting(60.0, "Longest silence between two tokens of a request.", min=0.1)
    place_timeout_s: float = setting(10.0, "Longest wait for a router, other than in its queue.", min=0.01)
    message_pace_s: float = setting(
        DEFAULT_PACE_S,
        "Least time between two messages to one worker; requests that come meanwhile share the next one. 0: none waits.",
        min=0,
        max=1,
    )
    link_timeout_s: float = setting(5.0, "Longest wait for a connection to a worker.", min=0.01)
    placement_attempts: int = setting(
        3,
        "Placements of one request, while nothing of its answer was shown, that may end with a refusal or with lost KV.",
        min=1,
        max=16,
    )
    worker_losses_max: int = setting(
        8,
        "Workers that may be lost under one request of which nothing was shown; the last one ends it. A request whose workers' "
        "engines die ends with the second one.",
        min=1,
        max=32,
    )
    retry_after_s: float = setting(1.0, "What a refused client is told to wait.", min=0.1)
    drain_notice_s: float = setting(
        0.0,
        "How long a stopping frontend says that it is not ready before it refuses requests; for slow balancers.",
        min=0,
    )
    inline_characters_max: int = setting(
        65_536,
        "Longer prompts are tokenised in a thread; this much takes about 1 ms on the event loop. A sixteenth of it for models that "
        "the quick tokenizer does not fit.",
        min=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Where tokenizers and templates come from."""

    cache_dir: str = setting(
        "", "Hugging Face cache to look in for models that are not a directory; empty: its default."
    )
    reload_s: float = setting(5.0, "Pause before a model whose files could not be read is tried again.", min=0.1)
    fast_tokenizer: bool = setting(
        True, "Whether fastokens encodes prompts, for models where it gives the same tokens; a tenth of the time."
    )
    remembered_characters_max: int = setting(
        2_000_000,
        "Characters of earlier prompts whose tokens are kept for the next turn, of each model; about 15 bytes each. 0: none.",
        min=0,
    )
    template: TemplateLimits = field(default_factory=TemplateLimits)
    parser_process: ParserProcessSettings = field(default_factory=ParserProcessSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """A frontend process."""

    instance_id: str = setting("", "Registered id; empty: made of host and process.")
    processes: int = setting(
        1, "Processes that share the HTTP port, one for each core that the frontend may fill.", min=1, max=256
    )
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)
    tool_parser: str = setting(
        "auto",
        "How tool calls are read: a family, auto (found out from the model's chat template and tokens), none, or vllm:NAME "
        "(vLLM's parser, in a process of its own); for several models MODEL=FAMILY,MODEL=FAMILY.",
    )
    reasoning_parser: str = setting("auto", "How reasoning is read; as tool_parser.")
    http: HttpSettings = field(default_factory=HttpSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    state_dir: str = setting(
        "",
        "Directory of stored responses, files and batches; empty: $XDG_STATE_HOME/kvmesh, else ~/.local/state/kvmesh.",
    )
    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    kserve: KserveSettings = field(default_factory=KserveSettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    router: RouterLinkSettings = field(default_factory=RouterLinkSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    lifecycle: LifecycleSettings = field(default_factory=LifecycleSettings)

    def __post_init__(self) -> None:
        """Parsers must be known."""
        try:
            self.parser_names.check()
            if self.parser_names.needs_vllm:
                check_installed()
        except UnsupportedError as error:
            raise ValueError(f"{error.field}: {error.message}") from error

    @property
    def parser_names(self) -> ParserNames:
        """What is said of parsers."""
        return ParserNames(tools=self.tool_parser, reasoning=self.reasoning_parser)
