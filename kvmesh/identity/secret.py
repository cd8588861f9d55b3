"""The mesh's secret, which every service holds, and the tags that prove that a record comes from a holder."""

import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from kvmesh.errors import InvalidRequestError

SECRET_BYTES_MIN = 32
TAG_BYTES = 32


class MeshSecret:
    """Makes and verifies tags (HMAC-SHA-256). A tag of one purpose is never valid for another."""

    def __init__(self, key: bytes) -> None:
        if len(key) < SECRET_BYTES_MIN:
            raise InvalidRequestError(
                f"the mesh's secret has {len(key)} bytes; it must have at least {SECRET_BYTES_MIN}",
                field="mesh.secret_file",
            )
        self._key = key

    def __repr__(self) -> str:
        return "MeshSecret()"

    @classmethod
    def from_file(cls, path: str) -> Self | None:
        """Returns the secret in a file; None for an empty path. InvalidRequestError when it cannot be read or is too short."""
        return cls(read_private(path, field="mesh.secret_file")) if path else None

    def tag(self, purpose: str, parts: Iterable[bytes]) -> bytes:
        """Each part is preceded by its length, so that parts cannot be shifted against each other."""
        message = b"".join(b"%d:%b" % (len(part), part) for part in (purpose.encode(), *parts))
        return hmac.digest(self._key, message, "sha256")

    def is_tag(self, tag: bytes, purpose: str, parts: Iterable[bytes]) -> bool:
        return hmac.compare_digest(tag, self.tag(purpose, parts))

    def derive(self, purpose: str) -> bytes:
        """Returns a key of 32 bytes for one purpose."""
        return self.tag(f"derive {purpose}", ())


def new_secret() -> bytes:
    """Returns a random secret as text, so that it fits in files and variables."""
    return secrets.token_urlsafe(SECRET_BYTES_MIN).encode()


def read_private(path: str, *, field: str) -> bytes:
    """Returns the content of a small file without surrounding white space. InvalidRequestError names the setting."""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise InvalidRequestError(f"{field}: {path} cannot be read: {error.strerror}", field=field) from error


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file by one that only this user can read."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    # With its mode from the start: a later `chmod` would let others read the file for a moment.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    temporary.replace(path)
