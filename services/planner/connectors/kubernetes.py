"""Kubernetes as an orchestrator: the scale subresource of Deployments, StatefulSets and other workloads, through the official client."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.settings import setting

REQUEST_TIMEOUT_S = 5.0
"""Longest wait for one response of the API server. The planner decides again some seconds later."""
KINDS = ("deployment", "statefulset", "replicaset")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """The connector `kubernetes`. Its account needs `get` and `patch` on the scale subresource (`deployments/scale` and so on)."""

    namespace: str = setting("default", "Namespace of the workloads.")
    config_file: str = setting("", "A kubeconfig file. Empty: the account of the pod in which the planner runs.")
    context: str = setting("", "Context of the kubeconfig file. Empty: its current one.")


class KubernetesOrchestrator:
    """A unit is a workload: `NAME`, a Deployment, or `KIND/NAME`.

    The client is blocking, so that each call runs in a thread; a call that is cancelled ends there by its time-out.
    """

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._api = _client(settings)

    async def resize(self, unit: str, workers: int) -> None:
        """A merge patch of the wanted size: repeating it changes nothing."""
        await self._call("patch", unit=unit, body={"spec": {"replicas": workers}})

    async def sizes(self, unit: str) -> tuple[int, int]:
        scale = await self._call("read", unit=unit)
        return int(scale.spec.replicas or 0), int(scale.status.replicas or 0)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._api.api_client.close)

    async def _call(self, verb: str, unit: str, **options: Any) -> Any:
        kind, name = kind_and_name(unit)
        # For example `patch_namespaced_stateful_set_scale`.
        method: Callable[..., Any] = getattr(self._api, f"{verb}_namespaced_{kind.replace('set', '_set')}_scale")
        try:
            return await asyncio.to_thread(
                method, name, self._settings.namespace, _request_timeout=REQUEST_TIMEOUT_S, **options
            )
        except Exception as error:  # The client raises its own errors and those of urllib3.
            raise _translated(error, unit) from error


def kind_and_name(unit: str) -> tuple[str, str]:
    """Raises InvalidRequestError for a kind without a scale subresource."""
    kind, slash, name = unit.partition("/")
    if not slash:
        return KINDS[0], unit
    if kind.lower() not in KINDS or not name:
        raise InvalidRequestError(f"{unit!r} is neither NAME nor KIND/NAME, with {', '.join(KINDS)}", field="pools")
    return kind.lower(), name


def _client(settings: KubernetesSettings) -> Any:
    """Raises UnavailableError without the package or an account."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise UnavailableError(
            "the connector kubernetes needs the package: pip install 'kvmesh[kubernetes]'", reason="no_package"
        ) from None
    configuration = client.Configuration()
    try:
        if settings.config_file:
            config.load_kube_config(
                settings.config_file, context=settings.context or None, client_configuration=configuration
            )
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise UnavailableError(f"no Kubernetes credentials: {error}", reason="no_account") from None
    # The planner decides again at its next interval, so a failure is not hidden by attempts.
    configuration.retries = False
    return client.AppsV1Api(client.ApiClient(configuration))


def _translated(error: Exception, unit: str) -> MeshError:
    status = getattr(error, "status", None)
    reasons: Mapping[int, tuple[type[MeshError], str]] = {
        403: (UnsupportedError, "not_permitted"),
        404: (NotFoundError, "workload_not_found"),
    }
    kind, reason = reasons.get(status or 0, (UnavailableError, "kubernetes_failed"))
    detail = getattr(error, "reason", None) or str(error)
    return kind(
        f"Kubernetes refused {unit}: {status} {detail}" if status else f"Kubernetes does not answer: {detail}",
        reason=reason,
    )
