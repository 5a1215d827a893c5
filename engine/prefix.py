"""The prefix tree: which sequences share which pages, and what is kept for later prompts.

A page holds the keys and values of 64 tokens, and sequences that begin with the same tokens share pages. A recurrent
state cannot be cut back: to go on after a prefix needs the states that were there, a checkpoint.
"""

import bisect
import dataclasses
import heapq
import operator
from dataclasses import dataclass

from kernels.card import CardError
from kernels.kv_cache import PAGE

PAGE_TOKENS = PAGE
CHECKPOINT_INTERVAL = 1024  # tokens: between two checkpoints of a prompt there are not more
CHECKPOINT_SPACING = 256    # nor fewer, but where it is likely that the next prompt leaves this one


def pages_for(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def whole_pages(n_tokens: int) -> int:
    """The multiple of 64 at or below."""
    return n_tokens // PAGE_TOKENS * PAGE_TOKENS


@dataclass(eq=False)
class Node:
    """A page of the prefix tree: 64 tokens that follow those of its parent, and what is kept of them."""

    parent: "Node | None"           # None: the root, which stands for no tokens at all
    tokens: tuple[int, ...]
    n_prompt: int                   # of these, the first n_prompt were computed as a prompt, the others decoded
    page: int
    depth: int = 0                  # pages from the root to the end of this one
    n_decoded: int = 0              # of the tokens from there on, those that were decoded
    children: dict = dataclasses.field(default_factory=dict)    # tokens -> n_prompt -> Node
    n_users: int = 0                # running sequences whose tokens begin with these
    number: int | None = None       # of its checkpoint on the card
    host: int | None = None         # or in host memory
    n_answers: int = 0              # whose latest checkpoint this is, or was when they ended
    floor: int = 0                  # that of PrefixCache when its checkpoint was made or of use
    rank: tuple[int, int] = (0, 0)  # of its checkpoint: worth, then the order in which worths were set

    @property
    def is_kept(self) -> bool:
        """Whether it has a checkpoint."""
        return self.number is not None or self.host is not None

    def path(self):
        """This node and those above it but the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def kept_below(self):
        """The nearest nodes below that have a checkpoint."""
        ahead = [self]
        while ahead:
            below = [node for alike in ahead.pop().children.values() for node in alike.values()]
            yield from (node for node in below if node.is_kept)
            ahead += [node for node in below if not node.is_kept]


by_rank = operator.attrgetter("rank")


class PrefixCache:
    """Who has which page, and what the pages that no running sequence has are good for.

    A page is free, or a running sequence's own, or that of a node of the prefix tree, which is a full page of known
    tokens: sequences that begin with them share it. What a node's checkpoint, the states after its tokens, is good for
    is to go on from there without processing them anew. So a node stays as long as a running sequence's tokens begin
    with it or a checkpoint lies at or below it. The root's checkpoint are states of zeros.

    Prompts and decoded tokens run through other kernels, which round otherwise. So a page's bits, and those of the
    states after it, follow from the tokens up to there and from which of them were decoded: a node is known by both,
    and the same tokens have a node for each way in which they were computed. A running sequence comes to share those
    alone that hold what it has computed itself, so that no token depends on what runs beside; a prompt begins with the
    longest beginning that has a checkpoint, of several the one with the fewest decoded tokens. That is the one place
    where decoded tokens stand in for a prompt's.

    Where room is needed, what is worth least goes first. The worth of a checkpoint is

        tokens between it and the next checkpoint above + the floor when it was made or last of use:

    what would be processed again without it, and the floor, which is the highest worth of all that went so far, ages
    what is of no use (GreedyDual: P. Cao and S. Irani, "Cost-aware WWW proxy caching algorithms", 1997). For a
    checkpoint the least worthy on the card goes to host memory, and the least worthy there is dropped, whatever uses
    their nodes; for pages a leaf that no running sequence uses is dropped with its checkpoint, and what lies above it
    as far as nothing else needs that.

    Here is the accounting alone; the bytes are moved by `store`, a Pipeline, in the order of the calls.
    """

    def __init__(self, store, n_pages: int, n_checkpoints: int, n_host: int):
        self.store, self.n_pages, self.n_checkpoints = store, n_pages, n_checkpoints
        self.free_pages, self.free_numbers, self.free_hosts = (
            list(reversed(range(n))) for n in (n_pages, n_checkpoints, n_host))
        self.root = Node(None, (), 0, -1)
        self.on_card: list[Node] = []       # the nodes whose checkpoint is on the card, in the order of their ranks
        self.in_host: list[Node] = []       # or in host memory
        self.floor, self.n_ranked = 0, 0
        self.n_idle = 0                     # nodes without users
        self.n_spilled = self.n_fetched = self.n_dropped = 0

    # ---- pages ----

    @property
    def n_available(self) -> int:
        """Pages that no running sequence has."""
        return len(self.free_pages) + self.n_idle

    def take_pages(self, count: int) -> list[int]:
        """Free pages, made so where there are too few. CardError: sequences have them."""
        while len(self.free_pages) < count:
            kept = heapq.merge(self.on_card, self.in_host, key=by_rank)
            leaf = next((node for node in kept if not node.children and not node.n_users), None)
            if leaf is None:
                raise CardError(f"{count} KV pages are needed and {len(self.free_pages)} are free")
            self._evict(leaf)
        return [self.free_pages.pop() for _ in range(count)]

    # ---- the tree ----

    def find(self, tokens: list[int]) -> tuple[Node, int]:
        """Of the nodes that these tokens begin with, the one to go on from, which has a checkpoint; and how many tokens
        all span."""
        nodes, found = [self.root], self.root
        for at in range(0, whole_pages(len(tokens)), PAGE_TOKENS):
            key = tuple(tokens[at:at + PAGE_TOKENS])
            below = [child for node in nodes for child in node.children.get(key, {}).values()]
            if not below:
                break
            nodes = below
            found = min((node for node in nodes if node.is_kept), key=lambda node: node.n_decoded, default=found)
        return found, nodes[0].depth * PAGE_TOKENS

    def enter(self, node: Node) -> list[int]:
        """A sequence begins with the tokens of a node and uses its checkpoint: the pages of the path to there."""
        self.touch(node)
        path = list(node.path())
        for each in path:
            self._use(each)
        return [each.page for each in reversed(path)]

    def leave(self, node: Node, pages: list[int]):
        """A sequence ends: it has used these pages, of which those up to `node` are the tree's."""
        self.free_pages.extend(reversed(pages[node.depth:]))
        for each in node.path():
            each.n_users -= 1
            self.n_idle += not each.n_users
        self._prune(node)

    def grow(self, node: Node, tokens: tuple[int, ...], n_prompt: int, page: int) -> Node:
        """A page of a sequence whose path ends at `node` is full: the node that it is from now on.

        The first n_prompt of the tokens were computed as a prompt. Where the tree has that already, its page holds the
        same bits, and the sequence's is free.
        """
        alike = node.children.setdefault(tokens, {})
        if n_prompt in alike:
            self.free_pages.append(page)
        else:
            alike[n_prompt] = Node(node, tokens, n_prompt, page, node.depth + 1,
                                   node.n_decoded + PAGE_TOKENS - n_prompt)
            self.n_idle += 1
        self._use(alike[n_prompt])
        return alike[n_prompt]

    def _use(self, node: Node):
        self.n_idle -= not node.n_users
        node.n_users += 1

    def _prune(self, node: Node):
        """Forget a node that is of no use any more, and those above it that were for its sake."""
        while node is not self.root and not (node.children or node.n_users or node.is_kept):
            alike = node.parent.children[node.tokens]
            del alike[node.n_prompt]
            if not alike:
                del node.parent.children[node.tokens]
            self.free_pages.append(node.page)
            self.n_idle -= 1
            node = node.parent

    # ---- checkpoints ----

    def take_number(self) -> int | None:
        """A checkpoint on the card to be written, then `keep` it; None where all are being written."""
        if not self.free_numbers:
            if not self.on_card:
                return None
            self._make_room(self.on_card[0])
        return self.free_numbers.pop()

    def keep(self, node: Node, number: int):
        """Checkpoint `number` is that of a node, now that this was queued, instead of one that it had."""
        self._forget(node)
        node.number, node.floor = number, self.floor
        self._insert(node)
        self._rank_below(node)

    def touch(self, node: Node):
        """A node's checkpoint, if it has one, is of use."""
        if node.is_kept:
            node.floor = self.floor
            self._rank(node)

    def fetch(self, node: Node) -> int | None:
        """The number of a node's checkpoint, which is on the card then; None for the root. The node is in use."""
        if node.host is not None:
            self._remove(node)
            host, node.host = node.host, None
            number = self.take_number()     # may drop checkpoints, so this one is out of its way
            self.store.fetch(host, number)
            self.free_hosts.append(host)
            self.keep(node, number)
            self.n_fetched += 1
        return node.number

    def drop(self, node: Node):
        """Forget a node's checkpoint, if it has one, and what was there for its sake alone."""
        self._forget(node)
        self._prune(node)

    def clear(self):
        """Forget all that no running sequence uses."""
        for node in self.on_card + self.in_host:
            self.drop(node)

    def _forget(self, node: Node):
        if not node.is_kept:
            return
        self._remove(node)
        if node.number is not None:
            self.free_numbers.append(node.number)
        else:
            self.free_hosts.append(node.host)
        node.number = node.host = None
        self._rank_below(node)

    def _make_room(self, node: Node):
        """Move a node's checkpoint to host memory, or drop it where that has no room or only more worthy ones."""
        if not self.free_hosts and self.in_host and self.in_host[0].rank < node.rank:
            self._evict(self.in_host[0])
        if self.free_hosts and self.store.spill(node.number, host := self.free_hosts.pop()):
            self._remove(node)
            self.free_numbers.append(node.number)
            node.number, node.host = None, host
            self.floor = max(self.floor, node.rank[0])
            bisect.insort(self.in_host, node, key=by_rank)
            self.n_spilled += 1
        else:
            self._evict(node)

    def _evict(self, node: Node):
        self.floor = max(self.floor, node.rank[0])
        self.n_dropped += 1
        self.drop(node)

    # ---- their order ----

    def _order(self, node: Node) -> list[Node]:
        return self.in_host if node.number is None else self.on_card

    def _insert(self, node: Node):
        """Find a checkpoint's worth and its place."""
        above = next((each.depth for each in node.parent.path() if each.is_kept), 0)
        self.n_ranked += 1
        node.rank = PAGE_TOKENS * (node.depth - above) + node.floor, self.n_ranked
        bisect.insort(self._order(node), node, key=by_rank)

    def _remove(self, node: Node):
        order = self._order(node)
        del order[bisect.bisect_left(order, node.rank, key=by_rank)]

    def _rank(self, node: Node):
        """Its worth may have changed."""
        self._remove(node)
        self._insert(node)

    def _rank_below(self, node: Node):
        for each in node.kept_below():
            self._rank(each)


def checkpoint_positions(tokens: list[int], turn: int | None, start: int, known: int) -> list[int]:
    """Where a prompt, of which `start` tokens are cached, gets checkpoints: multiples of 64 below its length.

    These are the likely ends of what it has in common with later prompts: where turns begin (at token `turn`), the
    prompt's own end, and where it leaves the `known` tokens of an earlier one; and every CHECKPOINT_INTERVAL tokens.
    Of all those the ones nearer than CHECKPOINT_SPACING to the one before are left out, but for the end of the system
    prompt (the second turn's beginning), the last two turns' beginnings, the prompt's end and `known`.
    """
    turns = [whole_pages(at) for at, token in enumerate(tokens) if token == turn]
    likely = {*turns[1:2], *turns[-2:], whole_pages(len(tokens) - 1), known}
    found = [start]
    for at in sorted({*turns, *likely, *range(0, len(tokens), CHECKPOINT_INTERVAL)}):
        if start < at < len(tokens) and (at in likely or at - found[-1] >= CHECKPOINT_SPACING):
            found.append(at)
    return found[1:]
