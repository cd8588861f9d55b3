"""TensorRT-LLM's version from its package's metadata, which does not import it."""

from importlib.metadata import PackageNotFoundError, version

WRITTEN_FOR = "1.3.0rc29"
"""The release whose published API the adapter is written for."""


def installed_version() -> str:
    """The installed version, or else the one that the adapter is written for."""
    try:
        return version("tensorrt-llm")
    except PackageNotFoundError:
        return WRITTEN_FOR
