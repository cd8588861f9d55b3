"""Which files of a model a worker serves, how they are identified, and what a frontend accepts from a worker."""

from pathlib import Path

import pytest

from kvmesh.errors import UnavailableError, UnsupportedError
from kvmesh.model_files import (
    FILES_BYTES_MAX,
    FILES_MAX,
    PART_BYTES_MAX,
    FileAssembler,
    digest_of_contents,
    digest_of_files,
    is_model_file,
    list_files,
)

SERVED = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"x" * (PART_BYTES_MAX + 1),
    "tokenizer.model": b"y" * PART_BYTES_MAX,
    "tokenizer_config.json": b"",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}
NOT_SERVED = (
    "tokenizer.py",
    "tokenizer_custom.py",
    "tokenization_custom.py",
    "modeling.py",
    "tokenizer.json.py",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "tokenizer.pkl",
    "additional_chat_templates/x.py",
    "README.md",
    ".chat_template.jinja",
)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_only_listed_data_files_are_served(tmp_path: Path) -> None:
    """Code and weights are never served."""
    write(tmp_path, SERVED | dict.fromkeys(NOT_SERVED, b"import os"))
    assert {file.name: b"".join(file.parts()) for file in list_files(tmp_path)} == SERVED


@pytest.mark.parametrize(
    "name",
    [
        *NOT_SERVED,
        "",
        "..",
        "/config.json",
        "../config.json",
        "a/config.json",
        "additional_chat_templates/../x.jinja",
        "additional_chat_templates//x.jinja",
        "additional_chat_templates/a/x.jinja",
        "./config.json",
        "config.json\n",
        "a\\..\\x.jinja",
        "x\0.jinja",
        "x" * 250 + ".jinja",
    ],
)
def test_names_that_are_refused(name: str) -> None:
    """Names of other files are refused, because the name determines the file that a frontend writes."""
    assert not is_model_file(name)
    with pytest.raises(UnavailableError, match="no tokenizer"):
        FileAssembler("").add(name, b"", is_last=True)


def test_links_may_only_lead_into_the_directory_or_the_hubs_blobs(tmp_path: Path) -> None:
    """Links may lead to the model's directory or to blobs of the hub's cache. Any other link would serve a file outside the model."""
    repository = tmp_path / "models--org--name"
    write(repository / "blobs", {"abc": b"{}"})
    snapshot = repository / "snapshots" / "commit"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "generation_config.json").symlink_to("config.json")
    assert [file.path for file in list_files(snapshot)] == [repository / "blobs" / "abc"] * 2
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert digest_of_files(list_files(link)) == digest_of_files(list_files(snapshot))
    write(tmp_path, {"secret": b"key", "blobs/abc": b"{}"})
    for target in ("secret", "blobs/abc"):
        plain = write(tmp_path / f"plain-{target.replace('/', '-')}" / "model", {"config.json": b"{}"})
        (plain / "chat_template.jinja").symlink_to(tmp_path / target)
        with pytest.raises(UnsupportedError, match="outside"):
            list_files(plain)


def test_a_link_to_another_directory_of_templates_is_refused(tmp_path: Path) -> None:
    """A directory of templates that links to another place has files outside the model's directory."""
    write(tmp_path / "other", {"a.jinja": b"secret"})
    model = write(tmp_path / "model", {"config.json": b"{}"})
    (model / "additional_chat_templates").symlink_to(tmp_path / "other")
    with pytest.raises(UnsupportedError, match="outside"):
        list_files(model)


def test_limits(tmp_path: Path) -> None:
    """The number and the total size of files are limited."""
    many = write(tmp_path / "many", {f"{i}.jinja": b"" for i in range(FILES_MAX + 1)})
    with pytest.raises(UnsupportedError, match="limits"):
        list_files(many)
    large = write(tmp_path / "large", {"config.json": b"{}"})
    with (large / "tokenizer.json").open("wb") as stream:
        stream.truncate(FILES_BYTES_MAX)
    with pytest.raises(UnsupportedError, match="limits"):
        list_files(large)


def test_digest_depends_on_every_name_and_byte(tmp_path: Path) -> None:
    """The digest depends neither on the directory nor on other files."""
    digest = digest_of_contents(SERVED)
    assert len(digest) == 64
    assert digest_of_files(list_files(write(tmp_path / "a", SERVED))) == digest
    assert digest_of_files(list_files(write(tmp_path / "b", SERVED | {"model.safetensors": b"w"}))) == digest
    assert digest_of_contents(dict(reversed(SERVED.items()))) == digest
    different = [
        SERVED | {"config.json": b"{ }"},
        SERVED | {"vocab.json": b""},
        {name: content for name, content in SERVED.items() if name != "config.json"},
        {name.replace("tokenizer.model", "tokenizer2.model"): content for name, content in SERVED.items()},
    ]
    assert len({digest, *map(digest_of_contents, different)}) == 5
    assert digest_of_contents({}) == ""


def send(files: FileAssembler, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        for start in range(0, len(content) + 1, PART_BYTES_MAX):
            part = content[start : start + PART_BYTES_MAX]
            files.add(name, part, is_last=start + PART_BYTES_MAX > len(content))


def test_the_assembler_accepts_only_files_with_the_digest() -> None:
    """Other files are not used, and the error says what to do."""
    files = FileAssembler(digest_of_contents(SERVED))
    send(files, SERVED)
    assert files.contents() == SERVED
    for sent in (SERVED | {"config.json": b"[]"}, {}, {"config.json": b"{}"}):
        files = FileAssembler(digest_of_contents(SERVED))
        send(files, sent)
        with pytest.raises(UnavailableError, match="restart"):
            files.contents()


def test_parts_out_of_order_are_refused() -> None:
    """Parts of two files must not interleave, no file may repeat, and a file needs its last part."""
    files = FileAssembler("")
    files.add("config.json", b"{", is_last=False)
    with pytest.raises(UnavailableError, match="digest"):
        files.contents()
    with pytest.raises(UnavailableError, match="order"):
        files.add("vocab.json", b"", is_last=True)
    files.add("config.json", b"}", is_last=True)
    with pytest.raises(UnavailableError, match="order"):
        files.add("config.json", b"", is_last=True)


def test_a_worker_cannot_exhaust_the_memory() -> None:
    """The size of a part, the number of files and the total size are limited."""
    with pytest.raises(UnavailableError, match="limit"):
        FileAssembler("").add("config.json", b"x" * (PART_BYTES_MAX + 1), is_last=True)
    files = FileAssembler("")
    for i in range(FILES_MAX):
        files.add(f"{i}.jinja", b"", is_last=True)
    with pytest.raises(UnavailableError, match="limit"):
        files.add("last.jinja", b"", is_last=True)
    files, part = FileAssembler(""), b"x" * PART_BYTES_MAX
    for _ in range(FILES_BYTES_MAX // PART_BYTES_MAX):
        files.add("config.json", part, is_last=False)
    with pytest.raises(UnavailableError, match="limit"):
        files.add("config.json", b"x", is_last=True)
