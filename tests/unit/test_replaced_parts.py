"""Private parts of libraries that kvmesh replaces or reads. docs/contribute/replaced-parts.md lists each with its reason.

A failure means that the library has changed there. Read the reason on the page and the new source, adapt kvmesh, run the tests that the page
names, and record the new version and digest.
"""

import ast
import hashlib
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.parts import require_part

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contribute" / "replaced-parts.md"
NIXL_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
SOURCE = "source"
SIGNATURE = "signature"

REPLACED = [
    # file, name, what is compared, digest
    ("nixl_cu12/_api.py", "nixl_agent.__init__", SOURCE, "ab69bf7ea644"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler.schedule", SIGNATURE, "b725524d888b"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler._preempt_request", SIGNATURE, "363c16e104f3"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler.reset_prefix_cache", SIGNATURE, "54a0ab50f48c"),
    ("vllm/distributed/kv_events.py", "EventPublisher", SOURCE, "40eee7a6aa0b"),
    ("vllm/v1/engine/core.py", "EngineCore.step", SOURCE, "a4d753d3ba6a"),
    ("vllm/v1/engine/core.py", "EngineCore.step_with_batch_queue", SOURCE, "c2a1f9e6af2f"),
    ("vllm/v1/engine/core.py", "EngineCore.post_step", SOURCE, "dc6062026355"),
    ("vllm/v1/engine/core.py", "EngineCore.shutdown", SOURCE, "957d52ea71b8"),
    ("vllm/v1/engine/core_client.py", "InprocClient", SOURCE, "d445e02cf439"),
    ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.sample_tokens", SIGNATURE, "62693e2be565"),
    ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner._get_prompt_logprobs_dict", SOURCE, "f2e2ad4c2b62"),
    ("vllm/v1/core/sched/scheduler.py", "Scheduler._make_cached_request_data", SOURCE, "c03f36ff4e6c"),
    ("vllm/v1/engine/core.py", "EngineCore.preprocess_add_request", SOURCE, "a74921603930"),
    ("vllm/v1/worker/gpu_input_batch.py", "InputBatch.add_request", SOURCE, "5d043931d2e1"),
    ("vllm/v1/worker/gpu_input_batch.py", "CachedRequestState", SOURCE, "1c7a3fe1f3bf"),
    ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner._update_states", SOURCE, "cf0e7e1b995b"),
    ("vllm/v1/structured_output/request.py", "StructuredOutputRequest", SOURCE, "c9c7280cb018"),
    ("vllm/v1/structured_output/__init__.py", "StructuredOutputManager.grammar_init", SOURCE, "107855c358a0"),
    ("vllm/v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_cpu", SOURCE, "7ae494a965ae"),
    ("vllm/v1/sample/ops/topk_topp_sampler.py", "random_sample", SOURCE, "35cb75baf4d5"),
    ("vllm/v1/worker/gpu/states.py", "RequestState.add_request", SOURCE, "565aaa893c41"),
    ("vllm/lora/ops/torch_ops/lora_ops.py", "bgmv_shrink", SOURCE, "fb161e1078a5"),
    ("vllm/lora/ops/torch_ops/lora_ops.py", "bgmv_expand", SOURCE, "33cb1ccf3017"),
    ("vllm/lora/ops/torch_ops/lora_ops.py", "bgmv_expand_slice", SOURCE, "ce2c6116decf"),
    ("vllm/lora/punica_wrapper/punica_cpu.py", "PunicaWrapperCPU.add_lora_logits", SOURCE, "89acebbb8c21"),
    (f"{NIXL_CONNECTOR}/connector.py", "NixlPullConnector.__init__", SOURCE, "d409349aa6fa"),
    (f"{NIXL_CONNECTOR}/pull_scheduler.py", "NixlPullConnectorScheduler.request_finished", SOURCE, "94df55734f1c"),
    (
        f"{NIXL_CONNECTOR}/base_scheduler.py",
        "NixlBaseConnectorScheduler.update_connector_output",
        SOURCE,
        "a49375bacb85",
    ),
    (f"{NIXL_CONNECTOR}/base_scheduler.py", "NixlBaseConnectorScheduler.build_connector_meta", SOURCE, "e87b4e5c4735"),
    (f"{NIXL_CONNECTOR}/utils.py", "zmq_ctx", SOURCE, "5610369ae706"),
    (
        f"{NIXL_CONNECTOR}/base_scheduler.py",
        "NixlBaseConnectorScheduler._nixl_handshake_listener",
        SOURCE,
        "fd61bf4865ed",
    ),
    (f"{NIXL_CONNECTOR}/base_worker.py", "NixlBaseConnectorWorker.register_kv_caches", SOURCE, "ed16e4bb8745"),
    (f"{NIXL_CONNECTOR}/base_worker.py", "NixlBaseConnectorWorker.get_transfer_results", SOURCE, "a9a35a98620e"),
    (f"{NIXL_CONNECTOR}/base_worker.py", "NixlBaseConnectorWorker._pop_done_transfers", SOURCE, "2a3f231e3f51"),
    (f"{NIXL_CONNECTOR}/pull_worker.py", "NixlPullConnectorWorker.start_load_kv", SOURCE, "b052b30e4de5"),
    (f"{NIXL_CONNECTOR}/pull_worker.py", "NixlPullConnectorWorker._read_blocks", SOURCE, "e3ad24c77efb"),
]
READ: dict[str, set[str]] = {
    "vllm/v1/core/sched/scheduler.py": set(
        """
        _preempt_request failed_recving_kv_req_ids finished_recving_kv_req_ids kv_cache_manager kv_event_publisher
        max_num_scheduled_tokens need_mamba_block_aligned_split num_spec_tokens requests running
        use_v2_model_runner waiting
        """.split()
    ),
    "vllm/v1/core/sched/request_queue.py": {"_heap"},
    "vllm/v1/core/kv_cache_manager.py": {"block_pool", "kv_cache_event_metadata", "take_events"},
    "vllm/v1/engine/core.py": {"batch_queue", "post_step", "step_fn", "structured_output_manager"},
    "vllm/v1/structured_output/__init__.py": {"executor"},
    "vllm/v1/structured_output/request.py": {"_grammar"},
    "vllm/v1/sample/ops/topk_topp_sampler.py": {"use_fp64_gumbel"},
    "vllm/v1/worker/gpu_model_runner.py": {"discard_request_mask", "input_batch", "lora_manager"},
    "vllm/lora/worker_manager.py": {"_adapter_manager"},
    "vllm/lora/model_manager.py": {"punica_wrapper_mapping"},
    "vllm/lora/punica_wrapper/punica_base.py": {"_token_lora_indices"},
    f"{NIXL_CONNECTOR}/base_scheduler.py": {"_reqs_need_recv"},
    f"{NIXL_CONNECTOR}/base_worker.py": set(
        """
        _has_mamba _mixed_mem_types _pending_recv_notifs _recv_failures _recving_metadata _recving_transfers
        _registered_descs _remote_agents _replicated_pcp_done_sending _reqs_to_process _reqs_to_send compat_hash
        consumer_notification_counts_by_req expected_consumer_notifications_by_req nixl_backends nixl_wrapper
        transfer_topo use_host_buffer use_mla world_size xfer_stats
        """.split()
    ),
}


@cache
def source(file: str) -> str:
    """Returns the source of a file in an installed package, without importing it."""
    package = file.split("/")[0]
    require_part("nixl" if package.startswith("nixl") else "vllm")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"no {package}")  # Another back end of NIXL is installed.
    return (Path(found.origin).parents[1] / file).read_text(encoding="utf-8")


@cache
def nodes(file: str) -> Sequence[ast.AST]:
    """Returns all nodes of the file's syntax tree, the module first."""
    return list(ast.walk(ast.parse(source(file))))


def digest(file: str, name: str, what: str) -> str:
    """Returns a digest of a definition's lines, or of its parameters only. It does not depend on the version of Python."""
    *owners, last = name.split(".")
    inside = [node for node in nodes(file) if isinstance(node, ast.ClassDef) and node.name in owners] or nodes(file)[:1]
    found = [
        node
        for owner in inside
        for node in ast.iter_child_nodes(owner)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last
    ]
    assert found, f"{file} no longer defines {name}"
    node = found[0]
    if what == SIGNATURE and isinstance(node, ast.FunctionDef):
        text = ast.unparse(node.args)
    else:
        text = "\n".join(source(file).splitlines()[node.lineno - 1 : node.end_lineno])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize(("file", "name", "what", "expected"), REPLACED, ids=lambda value: str(value)[-40:])
def test_replaced_code_is_unchanged(file: str, name: str, what: str, expected: str) -> None:
    """The replacements were written against exactly this code."""
    assert digest(file, name, what) == expected


@pytest.mark.parametrize("file", READ)
def test_private_attributes_are_still_set(file: str) -> None:
    """The library still sets each private attribute that kvmesh reads or changes."""
    assigned = {
        getattr(node, "attr", None) or getattr(node, "name", None) or getattr(node, "id", None) for node in nodes(file)
    }
    assert not READ[file] - assigned


def test_the_page_lists_all_replaced_parts() -> None:
    """The page names every replaced definition and every private attribute."""
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`]+)`", page))
    assert {name.split(".")[-1] for _, name, _, _ in REPLACED} <= {word.split(".")[-1] for word in named}
    assert {name for names in READ.values() for name in names} <= named
