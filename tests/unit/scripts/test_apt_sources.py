from pathlib import Path

import pytest
from apt_sources import archives_of

DEB822 = """\
# comment
Types: deb deb-src
URIs: http://archive.example/debian
 http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no
"""
ONE_LINE = """\
# deb http://commented.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb http://vendor.example/debian bookworm stable
deb [arch=amd64 signed-by=/k.gpg] http://archive.example/debian bookworm main non-free # why
"""


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_deb822_lists_each_uri_of_the_release_with_its_key(apt: Path) -> None:
    """Updates, security and disabled sources are skipped."""
    (apt / "sources.list.d" / "debian.sources").write_text(DEB822)
    found = archives_of("bookworm", apt)
    assert [archive.uri for archive in found] == ["http://archive.example/debian", "http://mirror.example/debian"]
    assert {archive.options for archive in found} == {"[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "}


def test_one_line_format_keeps_options_and_skips_other_archives(apt: Path) -> None:
    """A vendor's archive that uses the name of the release has no component main."""
    (apt / "sources.list").write_text(ONE_LINE)
    [found] = archives_of("bookworm", apt)
    assert found.uri == "http://archive.example/debian"
    assert found.options == "[arch=amd64 signed-by=/k.gpg] "
    assert found.components == ("main", "non-free")


def test_without_sources_there_is_no_archive(apt: Path) -> None:
    """A machine without apt sources gets an empty list, not an error."""
    assert archives_of("bookworm", apt) == []
