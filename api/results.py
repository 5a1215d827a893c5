"""Results of tools, in the order of the calls that they answer.

Chat templates know no ids of calls: to a model, the first result is that of the first call. Clients send results as
they come, with the ids of their calls. So a conversation is put in order before it becomes a prompt.
"""

import collections
import math

from engine.request import RequestError


class CallId(str):
    """The id of the call that a result answers. field: of the request, for errors."""

    def __new__(cls, id: str, field: str):
        made = super().__new__(cls, id)
        made.field = field
        return made


def in_order(messages: list[dict]) -> list[dict]:
    """The messages of a conversation, with the results behind an assistant's message in the order of its calls.

    messages: as chat templates take them; the "tool_call_id" of a result is a CallId. One without an id, or with an
    empty one, answers the first call that no other result of these names; so does one with an unknown id, if there are
    calls without ids. Raises RequestError where an id is of no call before, or a call has two results.
    """
    ordered, calls, latest, row = list(messages), {}, [], []    # row: where the results since the last answer stand
    for i, message in enumerate([*messages, {"role": "assistant"}]):       # one more, which ends the last row
        if message["role"] == "tool":
            row.append(i)
        if message["role"] != "assistant":
            continue
        places = places_of([messages[j].get("tool_call_id") for j in row], calls, latest)
        for j, (_, result) in zip(row, sorted(zip(places, row))):
            ordered[j] = messages[result]
        made = collections.defaultdict(collections.deque)
        latest, row = [(i, j) for j in range(len(message.get("tool_calls") or ()))], []
        for place in latest:
            made[message["tool_calls"][place[1]].get("id") or None].append(place)
        calls |= made           # some clients number their calls anew in each turn
    return ordered


def places_of(ids: list[CallId | None], calls: dict, latest: list[tuple]) -> list[tuple]:
    """For each of these results the place of its call: (message, which of its calls).

    calls: id -> places of the calls that have no result yet, from which those of `ids` are taken. latest: places of
    the last message that calls tools.
    """
    places = [taken(id, calls) if id else None for id in ids]
    free = iter(sorted(set(latest) - set(places)))
    return [place or next(free, (math.inf,)) for place in places]


def taken(id: CallId, calls: dict) -> tuple | None:
    """The place of the first call of this id that has no result yet; now it has. None if none has it and some have no
    ids at all: then order tells."""
    if id not in calls and None in calls:
        return None
    if id not in calls:
        raise RequestError(id.field, f"'{id.field}' names no call before it: {id[:80]!r}")
    if not calls[id]:
        raise RequestError(id.field, f"'{id.field}' names a call that has its result already: {id[:80]!r}")
    return calls[id].popleft()
