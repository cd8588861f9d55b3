"""Limits SGLang's questions to a bootstrap server, which a decode engine asks from its scheduling loop."""

from typing import Any

ASK_TIMEOUT_S = 1.0
"""SGLang waits for 5 s, during which no request of the engine makes a step."""
ASKS_MAX = 3
"""SGLang asks a server that does not answer 15 times, a second apart. A prefill engine of the mesh listens before it is announced."""


def limit_waits() -> None:
    """A server that does not answer in time is asked again, or its request fails. Affects this process's GET calls only."""
    import requests

    original = requests.Session.request

    def request(self: Any, method: str, url: str, *arguments: Any, **options: Any) -> Any:
        timeout = options.get("timeout")
        if method.upper() == "GET" and isinstance(timeout, (int, float)):
            options["timeout"] = min(float(timeout), ASK_TIMEOUT_S)
        return original(self, method, url, *arguments, **options)

    requests.Session.request = request  # type: ignore[method-assign, assignment]


def limit_asks(scheduler: Any) -> None:
    """Requests whose bootstrap server does not answer fail after ASKS_MAX questions. `scheduler` is SGLang's."""
    if scheduler.disagg_decode_prealloc_queue is not None:
        scheduler.disagg_decode_prealloc_queue._max_ensure_retries = ASKS_MAX
