"""SamplingParams and constraints."""

from functools import lru_cache

from kvmesh.api.types.v1 import sampling_pb2 as pb
from kvmesh.checks import LOGIT_BIAS_MAX, STOP_STRINGS_MAX, STOP_TOKENS_MAX, check_length, check_sampling
from kvmesh.core import Constraint, ConstraintKind, SamplingParams
from kvmesh.core.sampling import RANGES
from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.codec.scalars import optional_field

DOCUMENT_BYTES_MAX = 256 << 10
REGEX_BYTES_MAX = 16 << 10
OPTIONS_MAX = 1024
OPTION_CHARACTERS_MAX = 4096
_ENTRIES_MAX = {"stop": STOP_STRINGS_MAX, "stop_token_ids": STOP_TOKENS_MAX, "logit_bias": LOGIT_BIAS_MAX}
CACHED_MAX = 256
CACHED_BYTES_MAX = 1024
"""Size of a message whose value is cached. Longer ones hold documents, which rarely repeat."""


def to_sampling(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams()
    fill_sampling(message, params)
    return message


def fill_sampling(message: pb.SamplingParams, params: SamplingParams) -> None:
    """Writes into a message's field, without a copy."""
    for name in RANGES:
        if (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    message.ignore_eos = params.ignore_eos
    message.skip_special_tokens = params.skip_special_tokens
    if params.stop:
        message.stop.extend(params.stop)
    if params.stop_token_ids:
        message.stop_token_ids.extend(params.stop_token_ids)
    for token_id, bias in params.logit_bias:
        message.logit_bias.add(token_id=token_id, bias=bias)
    if params.constraint is not None:
        message.constraint.CopyFrom(to_constraint(params.constraint))


def from_sampling(message: pb.SamplingParams, *, prefix: str = "sampling.") -> SamplingParams:
    """Returns the checked value; errors name fields with `prefix`. Parameters that many requests share are cached."""
    # The key of the cache, since messages cannot be hashed.
    data = message.SerializeToString()
    if len(data) > CACHED_BYTES_MAX:
        return _from_sampling(message, prefix)
    return _from_bytes(data, prefix)


@lru_cache(maxsize=CACHED_MAX)
def _from_bytes(data: bytes, prefix: str) -> SamplingParams:
    return _from_sampling(pb.SamplingParams.FromString(data), prefix)


def _from_sampling(message: pb.SamplingParams, prefix: str) -> SamplingParams:
    # Before the lists are built: a message of 8 MB has room for millions of entries.
    for name, most in _ENTRIES_MAX.items():
        check_length(len(getattr(message, name)), f"{prefix}{name}", high=most)
    scalars = {name: optional_field(message, name) for name in RANGES}
    params = SamplingParams(
        **scalars,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        constraint=from_constraint(message.constraint, prefix) if message.HasField("constraint") else None,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
    )
    check_sampling(params, prefix=prefix)
    return params


def to_constraint(constraint: Constraint) -> pb.Constraint:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return pb.Constraint(json_object=True)
        case ConstraintKind.CHOICE:
            return pb.Constraint(choice=pb.Choice(options=constraint.options))
        case kind:
            message = pb.Constraint()
            setattr(message, kind.value, constraint.text)
            return message


def from_constraint(message: pb.Constraint, prefix: str) -> Constraint:
    """Raises InvalidRequestError for an empty or unknown constraint."""
    kind = message.WhichOneof("kind")
    field = f"{prefix}constraint"
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidRequestError(f"{field} must set one kind", field=field)
    if kind == "choice":
        check_length(len(message.choice.options), f"{field}.choice.options", low=1, high=OPTIONS_MAX)
        for option in message.choice.options:
            check_length(len(option), f"{field}.choice.options", low=1, high=OPTION_CHARACTERS_MAX, unit="characters")
        return Constraint(kind=ConstraintKind.CHOICE, options=tuple(message.choice.options))
    text = "" if kind == "json_object" else getattr(message, kind)
    if kind != "json_object":
        bytes_max = REGEX_BYTES_MAX if kind == "regex" else DOCUMENT_BYTES_MAX
        check_length(len(text.encode()), f"{field}.{kind}", low=1, high=bytes_max, unit="bytes")
    return Constraint(kind=ConstraintKind(kind), text=text)
