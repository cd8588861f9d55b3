"""Preparations for the import of NIXL's Python API."""

import importlib.util
from typing import Any

_BACK_ENDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
SELECTING_MODULE = "nixl._api"


def api_module() -> str:
    """Returns the name of NIXL's API module, whether it is installed or not.

    The `nixl` package selects one of its back ends by the CUDA version, for which it imports all of torch: two seconds and 200 MiB.
    If only one back end is installed, this names it directly.
    """
    installed = [name for name in _BACK_ENDS if importlib.util.find_spec(name) is not None]
    return f"{installed[0]}._api" if len(installed) == 1 else SELECTING_MODULE


def set_progress_delay(api: Any, delay_us: int) -> None:
    """Makes the progress threads of future agents sleep between polls.

    NIXL's Python agent sets the delay to 0, with which the thread uses a whole core, and has no parameter for it. See
    docs/contribute/replaced-parts.md.
    """
    bindings = api.nixlBind
    make_agent = getattr(bindings.nixlAgent, "original", bindings.nixlAgent)

    def make_agent_with_delay(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    make_agent_with_delay.original = make_agent  # type: ignore[attr-defined]
    bindings.nixlAgent = make_agent_with_delay
