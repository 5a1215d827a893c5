"""Responses that are kept for clients, so that they can go on with a conversation: in memory, within bounds.

A response belongs to the API key that it was made with, and no other key can read it. On a server without keys all
responses belong to everybody who knows their ids, which cannot be guessed.
"""

import collections
import json
import threading
from dataclasses import dataclass

from .body import texts_of

MAX_RESPONSES = 4096        # that are kept
MAX_BYTES = 64 << 20        # of all kept responses together, as JSON
MAX_ONE = 8 << 20           # of one response; a longer one is not kept
OVERHEAD = 256              # bytes that Python needs beside each text


@dataclass(frozen=True)
class Entry:
    """A kept response as JSON texts: its input, its output items by their ids, and the rest of it."""

    head: bytes
    input: bytes
    output: dict[str, bytes]

    @property
    def n_bytes(self) -> int:
        texts = [self.head, self.input, *self.output.values()]
        return sum(map(len, texts)) + OVERHEAD * len(texts)


class Shelf:
    """What is kept for one API key. entries: by the ids of their responses, those first that nobody has read for the
    longest time."""

    def __init__(self):
        self.entries = collections.OrderedDict()
        self.holders = {}           # id of an output item -> the Entry with it
        self.n_bytes = 0

    def add(self, id: str, entry: Entry):
        self.entries[id] = entry
        self.holders |= dict.fromkeys(entry.output, entry)
        self.n_bytes += entry.n_bytes

    def remove(self, id: str):
        entry = self.entries.pop(id)
        for item in entry.output:
            del self.holders[item]
        self.n_bytes -= entry.n_bytes


class Stored:
    """All kept responses. Where they are too many or too large, the key that has the most bytes loses the response that
    nobody has read for the longest time.

    owner: the API key of a request; None on a server without keys.
    """

    def __init__(self):
        self.shelves = collections.defaultdict(Shelf)
        self.lock = threading.Lock()

    def keep(self, owner: bytes | None, response: dict, input: list[dict]) -> bool:
        """Keeps a response and the items of its input, unless they are longer than MAX_ONE. Returns whether it does."""
        if sum(map(len, texts_of(input))) > MAX_ONE:        # pictures: writing them as JSON would take long
            return False
        head = {name: value for name, value in response.items() if name != "output"}
        entry = Entry(json.dumps(head).encode(), json.dumps(input).encode(),
                      {item["id"]: json.dumps(item).encode() for item in response["output"]})
        if entry.n_bytes > MAX_ONE:
            return False
        with self.lock:
            self.shelves[owner].add(response["id"], entry)
            while self.n_responses > MAX_RESPONSES or self.n_bytes > MAX_BYTES:
                largest = max(self.shelves.values(), key=lambda shelf: shelf.n_bytes)
                largest.remove(next(iter(largest.entries)))
        return True

    @property
    def n_responses(self) -> int:
        return sum(len(shelf.entries) for shelf in self.shelves.values())

    @property
    def n_bytes(self) -> int:
        return sum(shelf.n_bytes for shelf in self.shelves.values())

    def find(self, owner: bytes | None, id: str) -> tuple[dict, list[dict]] | None:
        """A response and the items of its input; None where it is not kept for this owner."""
        with self.lock:
            shelf = self.shelves[owner]
            if id not in shelf.entries:
                return None
            shelf.entries.move_to_end(id)
            entry = shelf.entries[id]
        output = [json.loads(item) for item in entry.output.values()]
        return json.loads(entry.head) | {"output": output}, json.loads(entry.input)

    def find_item(self, owner: bytes | None, id: str) -> dict | None:
        """An item of the output of a kept response."""
        with self.lock:
            entry = self.shelves[owner].holders.get(id)
        return entry and json.loads(entry.output[id])

    def forget(self, owner: bytes | None, id: str) -> bool:
        """Whether there was such a response, which is now gone."""
        with self.lock:
            is_there = id in self.shelves[owner].entries
            if is_there:
                self.shelves[owner].remove(id)
            return is_there
