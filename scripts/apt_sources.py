"""Finds this machine's Debian package archives in its apt sources.

Both formats are read: deb822 (`*.sources`) and one line per source (`*.list`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

APT = Path("/etc/apt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A package archive. `options` is empty, or apt's options in brackets followed by a space."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: str


def release() -> dict[str, str]:
    """Returns the fields of /etc/os-release; empty if there is none."""
    path = Path("/etc/os-release")
    lines = path.read_text().splitlines() if path.exists() else []
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}


def archives_of(codename: str, apt: Path = APT) -> list[Archive]:
    """Returns the archives with a component `main` for a release, without its security and update suites.

    Includes archives of vendors, which use Debian's release names too.
    """
    archives = [archive for path in files(apt) for archive in parsed(path)]
    return [archive for archive in archives if codename in archive.suites and "main" in archive.components]


def files(apt: Path) -> list[Path]:
    """Returns the files that apt reads."""
    parts = apt / "sources.list.d"
    main = [path for path in (apt / "sources.list",) if path.exists()]
    return [*main, *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]


def parsed(path: Path) -> Iterator[Archive]:
    """Returns the archives in one file."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    return stanzas("\n".join(lines)) if path.suffix == ".sources" else one_line(lines)


def one_line(lines: list[str]) -> Iterator[Archive]:
    """Parses lines of the form `deb [options] uri suite components`."""
    for line in lines:
        if found := re.match(r"deb\s+(\[[^]]*\]\s+)?(\S+)\s+(\S+)(.*)", line.strip()):
            components = tuple(found[4].partition("#")[0].split())
            yield Archive(uri=found[2], suites=(found[3],), components=components, options=found[1] or "")


def stanzas(text: str) -> Iterator[Archive]:
    """Parses deb822: paragraphs of `Key: values`; lines that begin with a blank continue a value."""
    for paragraph in re.split(r"\n\s*\n", text):
        pairs = re.findall(r"^(\S+?):[ \t]*(.*(?:\n[ \t]+.*)*)", paragraph, re.MULTILINE)
        fields = {key.lower(): value.split() for key, value in pairs}
        if "deb" not in fields.get("types", []) or fields.get("enabled") == ["no"]:
            continue
        key = fields.get("signed-by", [])
        options = f"[signed-by={key[0]}] " if len(key) == 1 and key[0].startswith("/") else ""
        suites, components = tuple(fields.get("suites", [])), tuple(fields.get("components", []))
        for uri in fields.get("uris", []):
            yield Archive(uri=uri, suites=suites, components=components, options=options)
