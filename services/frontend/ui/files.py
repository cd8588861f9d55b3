"""The files of the page, which are data of the package."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

CONTENT_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
INDEX = "index.html"


class StaticFile(NamedTuple):
    """A file of the page."""

    body: bytes
    content_type: str
    etag: str


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Returns all files by name."""
    found = {}
    for path in (files("services.frontend.ui") / "static").iterdir():
        ending = path.name.rpartition(".")[2]
        if ending in CONTENT_TYPES:
            body = path.read_bytes()
            found[path.name] = StaticFile(
                body=body, content_type=CONTENT_TYPES[ending], etag=sha256(body).hexdigest()[:32]
            )
    return found
