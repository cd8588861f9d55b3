"""What must be equal for two SGLang engines to exchange KV."""

import hashlib
import importlib.metadata
import json
from typing import Any

from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import model_fingerprint
from kvmesh.engines.sglang.settings import SglangSettings

PACKAGES = {
    "nixl": "nixl",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "mooncake_tcp": "mooncake-transfer-engine-non-cuda",
}
UNIMPORTANT = ("_name_or_path", "transformers_version")


def compatibility_factors(scheduler: Any, settings: SglangSettings) -> dict[str, str]:
    """`scheduler` is SGLang's."""
    from sglang.version import __version__

    model, pool = scheduler.model_config, scheduler.token_to_kv_pool_allocator.get_kvcache()
    configuration = {key: value for key, value in model.hf_config.to_dict().items() if key not in UNIMPORTANT}
    return {
        "engine": "sglang",
        "engine_version": __version__,
        "model": model_fingerprint(settings.model, revision=settings.revision, hashes=FileHashes()),
        "configuration": hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(model.dtype),
        "cache_dtype": str(pool.store_dtype),
        "layout": type(pool).__name__,
        "block_size_tokens": str(scheduler.page_size),
        "transfer": f"{settings.transfer_backend} {_version(settings.transfer_backend)}",
        "ranks": str(settings.tensor_parallel_size),
    }


def _version(backend: str) -> str:
    try:
        return importlib.metadata.version(PACKAGES[backend])
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return ""
