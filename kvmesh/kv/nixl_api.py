"""What kvmesh needs of NIXL's Python API before it imports it."""

import importlib.util
from typing import Any

_BACK_ENDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
PICKING = "nixl._api"


def api_module() -> str:
    """The name of NIXL's module, which need not be installed.

    The `nixl` package picks one of its back ends by the CUDA version, and where torch was built without CUDA it imports all
    of torch to learn that: two seconds and 200 MiB. With one back end installed there is nothing to pick.
    """
    installed = [name for name in _BACK_ENDS if importlib.util.find_spec(name) is not None]
    return f"{installed[0]}._api" if len(installed) == 1 else PICKING


def set_progress_delay(api: Any, delay_us: int) -> None:
    """Lets the progress threads of agents made from now on sleep between polls.

    NIXL's Python agent has no parameter for it, and at its own 0 the thread takes a whole core. Listed in docs/contribute/replaced-parts.md.
    """
    bindings = api.nixlBind
    make_agent = getattr(bindings.nixlAgent, "original", bindings.nixlAgent)

    def make_agent_with_delay(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    make_agent_with_delay.original = make_agent  # type: ignore[attr-defined]
    bindings.nixlAgent = make_agent_with_delay
