"""SGLang's scheduler with the link to the adapter in place of its own sockets.

SGLang starts three processes: the scheduler, one that tokenises and answers HTTP, one that detokenises. Prompts arrive as token ids and
answers leave as token ids, so only the scheduler is used.
"""

import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, PdRoleSwitchReqOutput
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

from kvmesh.engines.sglang.host.feeds import SglangEvents, current_load, to_changes
from kvmesh.engines.sglang.host.link import HostSocket
from kvmesh.engines.sglang.host.outputs import Outputs
from kvmesh.engines.sglang.host.patches import limit_asks
from kvmesh.engines.sglang.host.requests import Requests, abort, call_id, operation
from kvmesh.engines.sglang.host.role_switch import RoleSwitch
from kvmesh.engines.sglang.messages import Call, CallResult, Cancel, HostLoad, Snapshot, Submit

IDLE_WAIT_S = 1.0
TRANSFER_WAIT_S = 0.001
"""Pause between polls while requests wait for a transfer or a grammar only. SGLang itself polls without a pause."""


class MeshRequest(Req):  # type: ignore[misc]
    """A request whose `stop_token_ids` end it, whatever `ignore_eos` is: SGLang would ignore them with the end token."""

    def _check_token_based_finish(self, new_accepted_tokens: Sequence[int]) -> bool:
        stops = self.sampling_params.stop_token_ids
        if not (stops and self.sampling_params.ignore_eos):
            return bool(super()._check_token_based_finish(new_accepted_tokens))
        for position, token_id in enumerate(new_accepted_tokens, len(self.output_ids) - len(new_accepted_tokens)):
            if token_id in stops:
                self.finished_reason = FINISH_MATCHED_TOKEN(matched=token_id)
                self.finished_len = position + 1
                return True
        return False


class MeshScheduler(Scheduler):  # type: ignore[misc]
    """One rank of an engine. Rank 0 has the link; None in the others."""

    def __init__(self, server_args: Any, port_args: Any, link: HostSocket | None) -> None:
        self.link = link
        self.outputs = Outputs()
        self._events = SglangEvents()
        self._sent_load: HostLoad | None = None
        self._started_at_s = 0.0
        self._step_s = 0.0
        super().__init__(server_args, port_args)
        self._roles = RoleSwitch(self)
        self._requests = Requests(tokenizer=self.tokenizer, vocabulary_size=self.model_config.vocab_size)

    # ---- SGLang's extension points ----

    def init_ipc_channels(self, port_args: Any) -> None:
        nobody = SenderWrapper(None)
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=nobody,
            send_to_detokenizer=nobody,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        # The receiver calls `pull` of this object.
        self.recv_from_tokenizer = self if self.link is not None else None

    def init_idle_sleeper(self) -> None:
        self.idle_sleeper = self if self.link is not None else None

    def init_request_receiver(self) -> None:
        super().init_request_receiver()
        receiver = self.request_receiver
        # SGLang has made an instance of its own class. This one differs in one method only.
        fields = {name: getattr(receiver, name) for name in receiver.__dataclass_fields__}
        self.request_receiver: Any = LinkReceiver(**fields)

    def init_kv_events_publisher(self) -> None:
        self.kv_events_publisher = SchedulerKvEventsPublisher(
            kv_events_config=None,
            tree_cache=self.tree_cache,
            send_metrics_from_scheduler=None,
            max_running_requests=self.max_running_requests,
            max_total_num_tokens=self.max_total_num_tokens,
            get_stats=lambda: self.metrics_reporter.stats,
        )
        if self.link is not None:
            self.kv_events_publisher.enable_kv_cache_events = True
            self.kv_events_publisher.kv_event_publisher = self

    def init_disaggregation(self) -> None:
        super().init_disaggregation()
        limit_asks(self)

    def handle_pd_role_switch(self, recv_req: Any) -> Any:
        """Runs on all ranks of the engine. SGLang then leaves the event loop of the former role."""
        problem = self._roles.switch(recv_req.new_role)
        self._event_loop_should_restart = not problem
        return PdRoleSwitchReqOutput(success=not problem, message=problem, new_role=recv_req.new_role)

    def get_output_streamer_class(self) -> type[Any]:
        return streamer_class(self.outputs)

    def _create_generation_req(self, recv_req: Any, *arguments: Any, **options: Any) -> MeshRequest:
        return MeshRequest(*arguments, **options)

    def run_batch(self, *arguments: Any, **options: Any) -> Any:
        if not self.outputs.is_empty:
            # A decode engine has the first tokens of transferred requests before the step.
            self.flush()
        self._started_at_s = time.monotonic()
        return super().run_batch(*arguments, **options)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        self._step_s = time.monotonic() - self._started_at_s
        self.flush()

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        super().process_input_requests(recv_reqs)
        if not self.outputs.is_empty:
            self.flush()

    def send_abort_output(self, abort_req: AbortReq, req: Any) -> None:
        self.outputs.abort(abort_req.rid, abort_req.finished_reason)

    def send_control_output(self, output: Any, recv_req: Any) -> None:
        if self.link is not None and recv_req.rid:
            problem = getattr(output, "error_message", "") or getattr(output, "message", "")
            self.flush()
            self.link.send(CallResult(call_id(recv_req.rid), bool(output.success), str(problem or "")))

    def on_idle(self) -> None:
        super().on_idle()
        if self.link is not None and not self.is_fully_idle():
            self.flush()
            self.link.wait(TRANSFER_WAIT_S)

    def maybe_sleep(self) -> None:
        """The idle sleeper: until the adapter sends something."""
        assert self.link is not None
        self.flush()
        self.link.wait(IDLE_WAIT_S)

    def publish(self, batch: Any) -> None:
        """The publisher of KV events."""
        self.outputs.kv_changes += to_changes(self._events.translate(batch.events))

    # ---- the link ----

    def pull(self) -> list[Any]:
        """SGLang's requests for the messages that have arrived."""
        assert self.link is not None
        requests = [self._request(message) for message in self.link.receive()]
        return [request for request in requests if request is not None]

    def _request(self, message: Any) -> Any:
        match message:
            case Submit():
                try:
                    return self._requests.submit(message)
                except (ValueError, TypeError) as error:
                    self.outputs.refuse(message.number, str(error))
                    return None
            case Cancel():
                return abort(message)
            case Call(operation="snapshot"):
                self._send_snapshot()
                return None
            case _:
                return operation(message)

    def _send_snapshot(self) -> None:
        assert self.link is not None
        self.kv_events_publisher.publish_kv_events()
        self.outputs.kv_changes = []  # The snapshot has them.
        self.link.send(Snapshot(to_changes(self._events.snapshot())))

    def flush(self) -> None:
        """Sends what has changed."""
        if self.link is None:
            return
        self.kv_events_publisher.publish_kv_events()
        load = current_load(self, step_s=self._step_s)
        if self.outputs.is_empty and load == self._sent_load:
            return
        self._sent_load = load
        self.link.send(self.outputs.take(load))


class LinkReceiver(SchedulerRequestReceiver):  # type: ignore[misc]
    """Receives requests from the link. SGLang then passes them to the other ranks."""

    def _pull_raw_reqs(self) -> list[Any] | None:
        scheduler: MeshScheduler | None = self.recv_from_tokenizer
        return scheduler.pull() if scheduler is not None else None


def streamer_class(outputs: Outputs) -> type[Any]:
    """SGLang's output streamer with another destination. SGLang's builds thirty lists for its detokeniser in each step."""

    class Streamer(SchedulerOutputStreamer):  # type: ignore[misc]
        def _stream_output_generation(  # noqa: PLR0917  # SGLang calls it.
            self, reqs: Any, return_logprob: bool, skip_req: Any = None, is_idle_batch: bool = False
        ) -> None:
            for req in reqs:
                if req is not skip_req:
                    outputs.add(req)

        def _stream_output_embedding(self, reqs: Any) -> None:
            for req in reqs:
                outputs.add_embedding(req)

    return Streamer
