"""The URL of a shared database: its checks before anything connects, and the choice of the driver."""

import importlib.util
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from kvmesh.clock import Clock
    from services.frontend.settings import StoresSettings
    from services.frontend.stores.database import Database

SCHEMES = ("postgresql", "postgres")


def check_url(url: str) -> None:
    """Raises ValueError for a URL of another database, for one with a password, and if the driver is not installed."""
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError("stores.url must begin with postgresql://")
    if parts.password is not None or "password" in parse_qs(parts.query, keep_blank_values=True):
        # Other users of the machine can read command lines, and settings are printed.
        raise ValueError("stores.url has a password; put it into the file stores.password_file or into PGPASSWORD")
    if not all(importlib.util.find_spec(name) for name in ("psycopg", "psycopg_pool")):
        raise ValueError("stores.url needs the extra `postgres`: pip install 'kvmesh[postgres]'")


def shared_database(settings: "StoresSettings", clock: "Clock") -> "Database | None":
    """Returns the database that the settings name, not open yet; None without one."""
    if not settings.url:
        return None
    # Only here: the driver is an optional package.
    from services.frontend.stores.postgres import PostgresDatabase
    from services.frontend.stores.postgres_schema import MIGRATIONS

    return PostgresDatabase(settings, MIGRATIONS, clock)
