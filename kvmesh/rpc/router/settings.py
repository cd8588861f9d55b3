"""Settings of a frontend's link to the routers."""

from dataclasses import dataclass

from kvmesh.settings import internal, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLinkSettings:
    """Bounds of the link to the routers."""

    routers: int = setting(2, "Routers to keep a stream to; a second one takes over at once.", min=1, max=16)
    answer_timeout_s: float = setting(
        2.0, "A router that leaves an ask, or a new stream, unanswered for so long is given up.", min=0.01
    )
    report_delay_s: float = internal(
        0.01,
        "Longest time for which news of a request waits to be sent with others; failures are told at once. 0: none waits.",
    )
    ask_delay_s: float = internal(
        0.001,
        "Longest time for which an ask waits to be sent with others while `asks_ahead` of its stream are unanswered. 0: none waits.",
    )
    asks_ahead: int = internal(
        4,
        "Unanswered asks of a stream from which on the next ones go out together: one message costs more than one ask.",
    )
    asks_max: int = internal(16, "Asks in a message: the first of them waits for the decision on the last.")
    reconnect_min_s: float = internal(0.05, "First pause after a router could not be reached.")
    reconnect_max_s: float = internal(1.0, "Longest pause between attempts.")
    move_pause_s: float = internal(
        5.0, "Mean pause before a stream moves to a router that is preferred, and between two moves."
    )
    shun_s: float = internal(
        60.0,
        "Time for which no stream moves to a router whose stream broke: one that hangs looks well until it is asked.",
    )
    leave_s: float = internal(
        10.0, "Longest time for which a stream that moves waits for the ends of what its router placed."
    )
    messages_max: int = internal(65_536, "Asks and reports that wait to be written.")
