"""The APIs beside chat and completions, put together: their parts and their routes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.lifecycle import Part
from kvmesh.telemetry import Instruments
from services.frontend.api.anthropic.serve import Messages
from services.frontend.api.batches.part import Batches
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.http.server import Extension
from services.frontend.api.openapi.routes import Description
from services.frontend.api.responses.serve import Responses
from services.frontend.api.responses.settings import ResponsesSettings
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.stores.database import state_directory
from services.frontend.stores.responses import ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Settings of all of them."""

    state_dir: str = ""
    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)


class Apps:
    """`parts` start before the HTTP server, `extensions` add its routes."""

    def __init__(
        self, pipeline: Pipeline, settings: AppSettings, instruments: Instruments, *, instance_id: str
    ) -> None:
        directory = state_directory(settings.state_dir)
        self.responses = Responses(_response_store(settings, directory, pipeline), settings.responses)
        self.batches = Batches(
            Path(settings.batches.directory).expanduser() if settings.batches.directory else directory / "batches",
            settings.batches,
            pipeline,
            self.responses,
            instruments,
            instance_id=instance_id,
        )
        self.parts: Sequence[Part] = (self.responses, self.batches)
        self.extensions: Sequence[Extension] = (self.responses, Messages(), self.batches, Description())


def _response_store(settings: AppSettings, directory: Path, pipeline: Pipeline) -> ResponseStore | None:
    if not settings.responses.is_on:
        return None
    path = Path(settings.responses.path).expanduser() if settings.responses.path else directory / "responses.sqlite"
    return ResponseStore(path, settings.responses, pipeline.clock)
