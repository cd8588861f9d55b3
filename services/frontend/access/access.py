"""Access control: reloads the API keys, authenticates callers, applies quotas and accounts usage.

Without a source of keys every request is allowed and no quota applies. If the key document cannot be read, the current keys stay valid,
so that an error in a rotation locks no client out. At the start, the process ends.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from kvmesh.clock import Clock
from kvmesh.core import Usage
from kvmesh.discovery.base import FRONTEND, Registry
from kvmesh.discovery.members import watch_members
from kvmesh.errors import InvalidRequestError, MeshError, UnauthenticatedError, UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.telemetry import Instruments
from services.frontend.access.caller import ANYBODY, Caller
from services.frontend.access.keys import KeyBook, read_keys
from services.frontend.access.quotas import Permit, Quotas
from services.frontend.access.settings import AccessSettings
from services.frontend.pipeline.request import Request

_log = event_logger(__name__)
DOCUMENT_BYTES_MAX = 64 << 20
RELOAD_INTERVAL_S = 2.0
"""Time between two reads of the keys: short, since a revoked key is valid until the next one."""
BODY_BYTES_PER_CHARGED = 32
"""Bytes of a refused request's body per token that the quota is charged: less than a fifth of what the body would cost as a prompt."""
# 401: there is no caller to charge. 429: the quota is used up. 499: the client has disconnected.
_NOT_CHARGED = (401, 429, 499)
Decided = TypeVar("Decided")
_KINDS = ("prompt", "cached", "output", "reasoning")


class Access:
    """Authenticates and accounts requests. `run` follows the keys until cancelled."""

    def __init__(
        self,
        settings: AccessSettings,
        clock: Clock,
        *,
        instruments: Instruments | None = None,
        registry: Registry | None = None,
    ) -> None:
        instruments = instruments or Instruments(CollectorRegistry(), "frontend")
        self._settings = settings
        self.needs_key = settings.needs_key
        self.sharing_tenants = settings.prefix_sharing_tenants
        """Tenants that share cached prefixes; see `isolated`."""
        self._clock = clock
        self._registry = registry
        self._book = KeyBook()
        self._document = b""
        self.quotas = Quotas()
        self._refused = instruments.counter(
            "refused_requests", help="Requests refused because of their key or quota.", labels=["reason"]
        )
        self._used = instruments.tally(
            "usage_tokens",
            help="Tokens of requests that ended, each counted once however often it was placed.",
            labels=["model", "kind"],
        )

    async def start(self) -> None:
        """Loads the keys. Raises InvalidRequestError if the document is malformed."""
        if self.needs_key:
            await self._load()

    async def run(self) -> None:
        """Reloads the keys and follows the number of frontends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self.needs_key:
                tasks.create_task(self._follow_keys(), name="access-keys")
                if self._settings.shares_quotas and self._registry is not None:
                    tasks.create_task(self._follow_frontends(self._registry), name="access-share")

    async def aclose(self) -> None:
        """Does nothing; the runner cancels `run`."""

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Returns the caller whose key is in the headers of an HTTP request or the metadata of a gRPC call.

        The key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises UnauthenticatedError.
        """
        if not self.needs_key:
            return ANYBODY
        return self._counting_refusal(lambda: self._book.find(_key_of(headers), wall_s=self._clock.wall()))

    def caller_of(self, tenant: str) -> Caller:
        """Returns the caller for a tenant's work that outlives its request. Raises UnauthenticatedError if it has no valid key."""
        return self._book.of_tenant(tenant, wall_s=self._clock.wall()) if self.needs_key else ANYBODY

    def check_priority(self, request: Request, caller: Caller) -> None:
        """Raises InvalidRequestError for a priority above that of the caller's key."""
        most = caller.quota.priority_max
        if most is not None and request.priority > most:
            field = request.named("priority")
            raise InvalidRequestError(f"{field} must be at most {most} with this key", field=field)

    def enter(self, caller: Caller, *, prompt_tokens: int, output_tokens_max: int) -> Permit | None:
        """Reserves quota for the caller. Raises OverloadedError, or InvalidRequestError if the request can never fit."""
        if caller is ANYBODY:
            return None
        return self._counting_refusal(
            lambda: self.quotas.enter(
                caller, prompt_tokens=prompt_tokens, output_tokens_max=output_tokens_max, now_s=self._clock.now()
            )
        )

    def check_level(self, caller: Caller) -> None:
        """Raises OverloadedError while the caller's quotas are overdrawn, so that nothing more is read of its requests."""
        if caller is not ANYBODY:
            self._counting_refusal(lambda: self.quotas.check_level(caller, now_s=self._clock.now()))

    def charge(self, caller: Caller, *, requests: int = 0, tokens: int = 0) -> None:
        """Charges work other than a run: texts that were tokenised, bodies that were refused. It may overdraw the quotas."""
        if caller is not ANYBODY:
            self.quotas.charge(caller, requests=requests, tokens=tokens, now_s=self._clock.now())

    def charge_refusal(self, caller: Caller, code: int, *, body_bytes: int) -> None:
        """Charges a request that ended with an error of its client. `code`: its HTTP status, also of a gRPC call."""
        if 400 <= code < 500 and code not in _NOT_CHARGED:
            self.charge(caller, requests=1, tokens=body_bytes // BODY_BYTES_PER_CHARGED)

    def leave(self, permit: Permit | None, usage: Usage, *, caller: Caller, request_id: str, model: str) -> None:
        """Records the usage of a request that ended, successfully or not. Called once per request."""
        if permit is not None:
            self.quotas.leave(permit, usage, now_s=self._clock.now())
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
        for kind, count in zip(_KINDS, counts, strict=True):
            if count:
                self._used.of(model, kind).value += count
        _log.info(
            "usage",
            request_id=request_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            model=model,
            **{f"{kind}_tokens": count for kind, count in zip(_KINDS, counts, strict=True)},
        )

    def _counting_refusal(self, decide: Callable[[], Decided]) -> Decided:
        try:
            return decide()
        except MeshError as error:
            self._refused.labels(error.reason).inc()
            raise

    async def _follow_keys(self) -> None:
        while True:
            await self._clock.sleep(RELOAD_INTERVAL_S)
            try:
                await self._load()
            except (MeshError, OSError) as error:
                _log.error("keys_not_reloaded", detail=str(error))

    async def _load(self) -> None:
        document = await self._read()
        if document == self._document:
            return
        self._book = read_keys(document)
        # Only a valid document: an invalid one is read and logged again, until it is corrected.
        self._document = document
        _log.info("keys_loaded", keys=len(self._book.entries))

    async def _read(self) -> bytes:
        if self._settings.keys_file:
            document = await asyncio.to_thread(Path(self._settings.keys_file).read_bytes)
        else:
            if self._registry is None:
                raise UnavailableError("keys_consul_key is set, but there is no registry", reason="no_registry")
            entry = await self._registry.get(self._settings.keys_consul_key)
            if entry is None:
                raise InvalidRequestError(f"the registry has no key {self._settings.keys_consul_key!r}", field="keys")
            document = entry.value
        if len(document) > DOCUMENT_BYTES_MAX:
            raise InvalidRequestError(f"the key document is larger than {DOCUMENT_BYTES_MAX} bytes", field="keys")
        return document

    async def _follow_frontends(self, registry: Registry) -> None:
        async with aclosing(watch_members(registry, FRONTEND, self._clock)) as views:
            async for view in views:
                # During an outage of the registry the last share stays.
                if not view.is_stale:
                    self.quotas.share = 1 / max(1, sum(instance.takes_requests for instance in view.instances))


def _key_of(headers: Mapping[str, str]) -> str:
    # aiohttp's headers ignore case. Those of gRPC are a plain dictionary with lower-case names.
    bearer = headers.get("Authorization") or headers.get("authorization") or ""
    word, _, key = bearer.partition(" ")
    if word.lower() == "bearer" and key.strip():
        return key.strip()
    if key := headers.get("x-api-key", ""):
        return key
    raise UnauthenticatedError("an API key is required: `Authorization: Bearer KEY`", reason="missing_api_key")
