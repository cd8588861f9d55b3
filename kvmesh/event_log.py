"""The log of events: an event in past tense, data in keys. `kvmesh.telemetry.logging` formats it, one line each.

    _log = event_logger(__name__)
    _log.info("request_finished", request_id=request_id, reason="stop")

Prompts and tokens are never logged.
"""

import logging
from typing import Any


class EventLogger:
    """Logs events with data."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **data: Any) -> None:
        self._write(logging.DEBUG, event, **data)

    def info(self, event: str, /, **data: Any) -> None:
        """For rare events, and one line per request."""
        self._write(logging.INFO, event, **data)

    def warning(self, event: str, /, *, exc_info: BaseException | None = None, **data: Any) -> None:
        """For problems that the mesh handles."""
        self._write(logging.WARNING, event, exc_info=exc_info, **data)

    def error(self, event: str, /, *, exc_info: BaseException | None = None, **data: Any) -> None:
        """For problems that an operator should act on."""
        self._write(logging.ERROR, event, exc_info=exc_info, **data)

    def critical(self, event: str, /, *, exc_info: BaseException | None = None, **data: Any) -> None:
        """For defects after which the process no longer does its work."""
        self._write(logging.CRITICAL, event, exc_info=exc_info, **data)

    def _write(self, level: int, event: str, /, *, exc_info: BaseException | None = None, **data: Any) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=exc_info, extra={"data": data})


def event_logger(name: str) -> EventLogger:
    """Returns the logger of a module, by its `__name__`."""
    return EventLogger(logging.getLogger(name))
