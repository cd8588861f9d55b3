"""The models that a simulated frontend serves."""

from collections.abc import Mapping, Sequence

from kvmesh.clock import Clock
from kvmesh.discovery.base import Registry
from services.frontend.model_cards import Described
from services.frontend.models import DiscoveredModels
from services.frontend.settings import ModelSettings
from services.frontend.text.text_model import TextModel


class _NoFiles:
    """Workers of a simulation have no files of a model."""

    async def fetch_model_files(self, address: str, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        """See FileSource."""
        raise AssertionError("a simulated frontend loads no files")


class SimulatedModels(DiscoveredModels):
    """Follows the workers and their cards in the registry as every frontend does. Its text model is given, not loaded from files."""

    def __init__(self, registry: Registry, text: TextModel, clock: Clock) -> None:
        super().__init__(registry=registry, source=_NoFiles(), settings=ModelSettings(), clock=clock)
        self._given = text

    async def _text(self, described: Sequence[Described]) -> TextModel:
        return self._given
