"""Settings of a frontend's link to the routers."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLinkSettings:
    """Streams to the routers, and when asks and reports are sent."""

    routers: int = setting(2, "Routers to keep a stream to; a second one takes over at once.", min=1, max=16)
    answer_timeout_s: float = setting(
        2.0, "A router that does not react to an ask or a new stream for so long is given up.", min=0.01
    )
    report_delay_s: float = internal(
        0.01,
        "Longest time for which a report waits to share a message; failures are sent at once. 0: none waits.",
    )
    ask_delay_s: float = internal(
        0.001,
        "Longest time for which an ask waits to share a message while `asks_ahead` of its stream are unanswered.",
    )
    asks_ahead: int = internal(
        4,
        "Unanswered asks of a stream from which on asks share messages: a message costs more than an ask.",
    )
    asks_max: int = internal(16, "Asks in a message; the answers to all of them wait for the last decision.")
    reconnect_min_s: float = internal(0.05, "First pause after a router could not be reached.")
    reconnect_max_s: float = internal(1.0, "Longest pause between attempts.")
    move_pause_s: float = internal(
        5.0, "Mean pause before a stream moves to a router that is preferred, and between two moves."
    )
    shun_s: float = internal(
        60.0,
        "Time for which no stream moves to a router whose stream broke: a router that hangs may pass its health check.",
    )
    leave_s: float = internal(
        10.0, "Longest time for which a stream that moves waits for the end of the requests that its router placed."
    )
    messages_max: int = internal(65_536, "Asks and reports that wait to be written.")
