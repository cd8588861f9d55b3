"""When a call is tried again. Pure: time and randomness are arguments."""

from dataclasses import dataclass
from random import Random

from kvmesh.errors import KvLostError, LostError, MeshError, OverloadedError, UnavailableError
from kvmesh.settings import setting

# Refused, so that nothing was done; or lost before anything was shown. Anything else would end the same way again.
RETRIABLE = (OverloadedError, UnavailableError, LostError, KvLostError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Only for calls of which nothing was handed out yet."""

    attempts_max: int = setting(4, "Tries of one call, the first included; 1: no second one.", min=1, max=100)
    pause_s: float = setting(0.2, "Pause before the second try; it doubles with each further one.", min=0)
    pause_s_max: float = setting(
        30.0, "Longest pause. A server that asks for more is not waited for: its answer is raised.", min=0
    )

    def wait_s(self, error: MeshError, attempt: int, left_s: float, generator: Random) -> float | None:
        """Seconds until the next try; None: raise the error. `attempt` counts from 0, `left_s` is the call's own time.

        At least the server's Retry-After, plus a random part of the growing pause, so that clients refused together do not retry together.
        """
        asked_s = error.retry_after_s or 0.0
        if not isinstance(error, RETRIABLE) or attempt + 1 >= self.attempts_max or asked_s > self.pause_s_max:
            return None
        grown_s = min(self.pause_s_max, self.pause_s * 2.0 ** min(attempt, 62))
        wait_s = asked_s + grown_s * generator.random()
        return wait_s if wait_s < left_s else None
