"""Where NIXL's Python API is. Imports nothing of it."""

import importlib.util

_BACK_ENDS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
PICKING = "nixl._api"


def api_module() -> str:
    """The module's name; there may be none.

    The `nixl` package picks one of its back ends by the CUDA version, and where torch was built without CUDA it imports all
    of torch to learn that: two seconds and 200 MiB. With one back end installed there is nothing to pick.
    """
    installed = [name for name in _BACK_ENDS if importlib.util.find_spec(name) is not None]
    return f"{installed[0]}._api" if len(installed) == 1 else PICKING
