"""Models the part of the OpenTelemetry collector's configuration that kvmesh uses. Unknown fields are errors, as in the collector.

https://opentelemetry.io/docs/collector/configuration/ and the README of each component.
"""

from typing import Annotated, Literal

import msgspec

Address = Annotated[str, msgspec.Meta(pattern="^[a-z0-9.]+:[0-9]+$")]
Duration = Annotated[str, msgspec.Meta(pattern="^[0-9]+(ms|s|m)$")]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Grpc(Strict):
    endpoint: Address


class Protocols(Strict):
    grpc: Grpc


class OtlpReceiver(Strict):
    protocols: Protocols


class Receivers(Strict):
    otlp: OtlpReceiver


class MemoryLimiter(Strict):
    check_interval: Duration
    limit_mib: Annotated[int, msgspec.Meta(gt=0)]


class SpanConditions(Strict):
    span: list[str]


class Filter(Strict):
    error_mode: Literal["ignore", "silent", "propagate"]
    traces: SpanConditions


class Batch(Strict):
    timeout: Duration


class Processors(Strict):
    memory_limiter: MemoryLimiter
    filter: Filter
    batch: Batch


class Tls(Strict):
    insecure: bool


class Queue(Strict):
    queue_size: Annotated[int, msgspec.Meta(gt=0)]


class Retry(Strict):
    max_elapsed_time: Duration


class OtlpExporter(Strict):
    endpoint: Address
    tls: Tls
    sending_queue: Queue
    retry_on_failure: Retry


class Exporters(Strict):
    otlp: OtlpExporter


class Pipeline(Strict):
    receivers: list[str]
    processors: list[str]
    exporters: list[str]


class Pipelines(Strict):
    traces: Pipeline


class Service(Strict):
    pipelines: Pipelines


class CollectorModel(Strict):
    receivers: Receivers
    processors: Processors
    exporters: Exporters
    service: Service
