"""Fingerprints of models and adapters: a model with another byte in a relevant file is another model."""

import os
from pathlib import Path

import pytest

from kvmesh.engines.file_hashes import ENTRIES_MAX, FileHashes
from kvmesh.engines.fingerprint import adapter_fingerprint, model_files, model_fingerprint

BIG = 1_000_000
COMMITS = {name: digit * 40 for name, digit in (("main", "a"), ("next", "b"))}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hashes(tmp_path: Path) -> FileHashes:
    return FileHashes(path=tmp_path / "cache" / "hashes.json")


def make_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"config.json": b"{}", "model.safetensors": bytes(BIG)} | files
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def make_hub_model(cache: Path, name: str, weights: bytes, *, is_blob: bool = True) -> None:
    """Writes a model in the layout of the hub's client: files named by their hash, and links to them per commit."""
    root = cache / f"models--{name.replace('/', '--')}"
    for branch, commit in COMMITS.items():
        snapshot = root / "snapshots" / commit
        for folder in (root / "refs", root / "blobs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        (root / "refs" / branch).write_text(commit)
        (snapshot / "config.json").write_text(branch)
        blob = root / "blobs" / (f"{weights.hex()[:8]:0<60}{branch:f<4}".encode().hex()[:64] if is_blob else "0" * 40)
        blob.write_bytes(weights)
        (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))


@pytest.mark.parametrize("position", [0, 70_000, BIG // 3, BIG - 70_000, BIG - 1])
def test_every_byte_of_the_weights_counts(tmp_path: Path, hashes: FileHashes, position: int) -> None:
    """A change at any position changes the fingerprint."""
    changed = bytearray(BIG)
    changed[position] = 1
    one = make_model(tmp_path / "one")
    other = make_model(tmp_path / "other", **{"model.safetensors": bytes(changed)})
    assert model_fingerprint(str(one), "", hashes) != model_fingerprint(str(other), "", hashes)


def test_a_model_that_is_replaced_in_place_is_detected(tmp_path: Path, hashes: FileHashes) -> None:
    """The cached hash is not used for other content with the same path, size and modification time."""
    folder = make_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    before, times = model_fingerprint(str(folder), "", hashes), os.stat(weights)
    weights.write_bytes(b"\1" + bytes(BIG - 1))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_fingerprint(str(folder), "", hashes) != before


def test_known_files_are_not_read_again(tmp_path: Path) -> None:
    """A hash is cached once the file has not changed for a while. After that its content is not read."""
    clock = Clock()
    path = tmp_path / "weights.bin"
    path.write_bytes(b"old")
    hashes = FileHashes(path=tmp_path / "hashes.json", wall=clock)
    clock.now_s = os.stat(path).st_mtime + 1.0
    first = hashes.get([path])
    assert "xxh3" not in (tmp_path / "hashes.json").read_text(), (
        "the file could still change within the same time stamp"
    )
    clock.now_s += 60.0
    assert FileHashes(path=tmp_path / "hashes.json", wall=clock).get([path]) == first
    forged = (tmp_path / "hashes.json").read_text().replace(first[path], "xxh3:known")
    (tmp_path / "hashes.json").write_text(forged)
    assert hashes.get([path]) == {path: "xxh3:known"}


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, content: str) -> None:
    """The cache only saves time, so damage to it must not fail a start."""
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"x")
    os.utime(weights, (1.0, 1.0))
    (tmp_path / "hashes.json").write_text(content)
    expected = FileHashes(path=tmp_path / "none" / "hashes.json").get([weights])
    assert FileHashes(path=tmp_path / "hashes.json").get([weights]) == expected


def test_a_cache_that_cannot_be_written_is_skipped(tmp_path: Path) -> None:
    """For example, the home directory may be read-only."""
    (tmp_path / "file").write_bytes(b"x")
    assert FileHashes(path=tmp_path / "file" / "hashes.json").get([tmp_path / "file"])


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    """The newest entries are kept."""
    clock = Clock()
    clock.now_s = 1e12
    hashes = FileHashes(path=tmp_path / "hashes.json", wall=clock)
    files = [tmp_path / f"{number}.bin" for number in range(ENTRIES_MAX + 10)]
    for path in files:
        path.touch()
    hashes.get(files)
    text = (tmp_path / "hashes.json").read_text()
    assert text.count("xxh3") == ENTRIES_MAX
    assert str(files[-1]) in text and str(files[0]) not in text


def test_a_hub_name_is_resolved_to_its_commit(tmp_path: Path, hashes: FileHashes) -> None:
    """A branch is resolved in the local cache. Large files are identified by their name, which is a hash, and are not read."""
    make_hub_model(tmp_path / "hub", "org/name", b"one")

    def of(revision: str) -> str:
        return model_fingerprint("org/name", revision, hashes, cache_folder=str(tmp_path / "hub"))

    assert of("") == of("main") == of(COMMITS["main"])
    assert of("next") == of(COMMITS["next"]) != of("")
    # The name of a blob is its hash, so its content is not read.
    blob = (tmp_path / "hub" / "models--org--name" / "snapshots" / COMMITS["main"] / "model.safetensors").resolve()
    before = of("")
    blob.write_bytes(b"changed")
    assert of("") == before


def test_small_hub_files_are_read(tmp_path: Path, hashes: FileHashes) -> None:
    """Their names are hashes of another kind."""
    for name, weights in (("a", b"one"), ("b", b"two")):
        make_hub_model(tmp_path / name, "org/name", weights, is_blob=False)
    prints = {model_fingerprint("org/name", "", hashes, cache_folder=str(tmp_path / name)) for name in "ab"}
    assert len(prints) == 2


def test_missing_weights_are_compatible_by_revision_only(tmp_path: Path, hashes: FileHashes) -> None:
    """Streamed weights cannot be hashed. Without a revision such an engine is compatible with no other engine."""
    (tmp_path / "config.json").write_text("{}")
    for model in ("org/absent", "s3://bucket/model", str(tmp_path)):
        prints = [
            model_fingerprint(model, revision, hashes, cache_folder=str(tmp_path))
            for revision in ("", "", "a", "a", "b")
        ]
        assert len(set(prints)) == 4
        assert prints[2] == prints[3]
    assert model_fingerprint(str(tmp_path), "", hashes, needs_weights=False) == model_fingerprint(
        str(tmp_path), "", hashes, needs_weights=False
    )


def test_the_processor_of_a_multimodal_model_counts(tmp_path: Path, hashes: FileHashes) -> None:
    """The processor and tokenizer of a multimodal model determine the placeholders of its media. The tokenizer of a text model does not
    count."""
    text = [make_model(tmp_path / f"text{n}", **{"tokenizer.json": bytes([n])}) for n in range(2)]
    assert len({model_fingerprint(str(folder), "", hashes) for folder in text}) == 1
    media = [
        make_model(tmp_path / f"{a}{b}", **{"preprocessor_config.json": bytes([a]), "tokenizer.json": bytes([b])})
        for a in range(2)
        for b in range(2)
    ]
    assert len({model_fingerprint(str(folder), "", hashes) for folder in media}) == 4
    code = make_model(tmp_path / "code", **{"modeling.py": b"x"})
    assert "modeling.py" in {path.name for path in model_files(str(code), "")}


def test_adapters_are_identified_by_content(tmp_path: Path, hashes: FileHashes) -> None:
    """Their names and folders do not matter."""
    folders = [
        make_model(tmp_path / name, **{"adapter_config.json": b"{}", "adapter_model.safetensors": weights})
        for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    ]
    prints = [adapter_fingerprint(str(folder), hashes) for folder in folders]
    assert prints[0] == prints[1] != prints[2]
