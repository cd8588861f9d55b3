"""Prints a schedule and the events of its run as lines of text."""

from collections.abc import Iterator, Sequence

from services.simulation.play import Outcome
from services.simulation.schedule import RequestPlan, Schedule, TimedFault

LINES_MAX = 400
EVENTS = {
    "arrived": "request {0} arrives",
    "placed": "{0} is placed: prefill {1}, decode {2}, {3} tokens cached",
    "prefill": "leg {0} is sent to {1} for its prompt",
    "prefilled": "leg {0} has its prompt, {1} tokens of it cached",
    "submit": "leg {0} is sent to {1}",
    "accepted": "{0} accepts leg {1}",
    "release": "handle {0} is given back to {1}",
    "cancel": "the client of {0} leaves, in {1}",
    "kill": "{0} is killed",
    "started": "{0} runs",
    "pause": "{0} is stopped",
    "resume": "{0} goes on",
    "drain": "{0} drains",
    "undo-drain": "{0} drains no more",
    "fault": "FAULT {0} of {1} {2} for {3} s, amount {4}",
    "fault-over": "the fault {0} of {1} is over",
    "resign": "{0} gives the lead up",
    "settled": "nothing is left, all workers are used",
    "ready": "the mesh is ready",
}


def describe(schedule: Schedule) -> Iterator[str]:
    """The schedule itself."""
    mesh = schedule.topology
    words = [
        f"{mesh.prefill} prefill",
        f"{mesh.decode} decode",
        f"{mesh.routers} routers",
        f"{mesh.frontends} frontends",
    ]
    words += [
        word
        for word, is_so in (("rendezvous", mesh.rendezvous), ("tight", mesh.is_tight), ("crowded", mesh.is_crowded))
        if is_so
    ]
    words += [f"{mesh.kv_groups} KV groups"] if mesh.kv_groups > 1 else []
    yield f"seed {schedule.seed}: " + ", ".join(words)
    events = [(fault.at_s, _fault(fault)) for fault in schedule.faults]
    events += [(plan.at_s, _request(plan)) for plan in schedule.requests]
    for at_s, text in sorted(events):
        yield f"{at_s:10.4f}  {text}"


def _fault(fault: TimedFault) -> str:
    other = f" {fault.other}" if fault.other else ""
    amount = f", amount {fault.amount:g}" if fault.amount else ""
    return f"FAULT   {fault.kind} {fault.target}{other}, {fault.duration_s:g} s{amount}"


def _request(plan: RequestPlan) -> str:
    text = f"request {plan.request_id} at frontend-{plan.frontend}: {plan.prefix_tokens}+{plan.tail_tokens} tokens, at most {plan.max_tokens}"
    text += f", n={plan.choices}" if plan.choices > 1 else ""
    text += ", whole" if plan.is_whole else ""
    text += ", with tools" if plan.has_tools else ""
    if plan.cancel_after_s is not None:
        text += f", leaves {plan.cancel_after_s:g} s after {plan.cancel_phase or 'its arrival'}"
    return text


def timeline(outcome: Outcome) -> Iterator[str]:
    """What happened, line by line: time in seconds since the start of the loop, then the event."""
    for line in outcome.lines[:LINES_MAX]:
        at, _, event, *words = line.split()
        if event == "ended":
            text = f"{words[0]} ends: {words[1]}, {sum(word.strip('[],') != '' for word in words[2:])} tokens"
        elif event in EVENTS:
            text = EVENTS[event].format(*words, *["-"] * 5)
        else:
            text = " ".join((event, *words))
        yield f"{float(at):10.4f}  {text}"
    if len(outcome.lines) > LINES_MAX:
        yield f"... {len(outcome.lines) - LINES_MAX} more lines"


def explain(schedule: Schedule, outcome: Outcome) -> Sequence[str]:
    """Returns all of it: schedule, events, problems."""
    return [
        *describe(schedule),
        "What happened (time of the loop):",
        *timeline(outcome),
        *(f"PROBLEM  {problem}" for problem in outcome.problems),
    ]
