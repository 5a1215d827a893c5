"""The prefix tree: which sequences share which pages, and what is kept for later prompts.

A page holds the keys and values of 64 tokens, and sequences that begin with the same tokens share pages. A recurrent
state cannot be cut back to an earlier position. A sequence that goes on after a shared beginning needs the states that
were saved there: a checkpoint.
"""

import bisect
import dataclasses
import heapq
import operator
from dataclasses import dataclass

from kernels.card import CardError
from kernels.kv_formats import PAGE

PAGE_TOKENS = PAGE
CHECKPOINT_INTERVAL = 1024  # tokens: checkpoints of a prompt are due at multiples of this
CHECKPOINT_SPACING = 256    # the smallest distance, except where the next prompt probably differs from this one


def pages_for(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def whole_pages(n_tokens: int) -> int:
    """The largest multiple of 64 that is not above n_tokens."""
    return n_tokens // PAGE_TOKENS * PAGE_TOKENS


def mark_after(mark: int, page) -> int:
    """The mark of a sequence's beginning that is one page longer than the beginning with the mark `mark`; the empty
    beginning has the mark 0. A beginning has the same mark in every process. Two beginnings have the same mark by
    accident only."""
    return hash((mark, *page))


def marks_of(keys: list[int]) -> list[int]:
    """The marks of the beginnings of a sequence, of one page, of two, ... keys: its tokens, see engine/sight.py."""
    found = [0]
    for start in range(0, whole_pages(len(keys)), PAGE_TOKENS):
        found.append(mark_after(found[-1], keys[start:start + PAGE_TOKENS]))
    return found[1:]


@dataclass(eq=False)
class Node:
    """A page of the prefix tree: 64 tokens that follow those of its parent, and what is kept of them."""

    parent: "Node | None"           # None: the root, which stands for no tokens at all
    tokens: tuple[int, ...]
    n_prompt: int                   # the first n_prompt of the tokens were computed as a prompt, the others decoded
    page: int
    depth: int = 0                  # pages from the root to the end of this one
    n_decoded: int = 0              # decoded tokens from the root to the end of this page
    mark: int = 0                   # of the tokens from the root to its end, see `mark_after`
    children: dict = dataclasses.field(default_factory=dict)    # tokens -> n_prompt -> Node
    n_users: int = 0                # running sequences whose tokens begin with the node's path
    number: int | None = None       # the number of its checkpoint, if the card has it
    host: int | None = None         # the number of its checkpoint, if host memory has it
    n_answers: int = 0              # answers, running or ended, whose latest checkpoint is this one
    floor: int = 0                  # of the PrefixCache, when the checkpoint was made or last used
    rank: tuple[int, int] = (0, 0)  # of the checkpoint: its worth, then the order in which worths were set

    @property
    def is_kept(self) -> bool:
        """Whether the node has a checkpoint."""
        return self.number is not None or self.host is not None

    def path(self):
        """This node and the nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def kept_below(self):
        """On every path down from here, the first node that has a checkpoint."""
        ahead = [self]
        while ahead:
            below = [node for alike in ahead.pop().children.values() for node in alike.values()]
            yield from (node for node in below if node.is_kept)
            ahead += [node for node in below if not node.is_kept]


class Branch:
    """A running sequence in the prefix tree: its tokens so far, and where they are kept.

    slot: its slot. tokens: those of the prompt, later also of the answer. The first n_prompt of them are the prompt.
    """

    def __init__(self, slot: int, prompt_ids: list[int], root: Node):
        self.slot, self.tokens, self.n_prompt, self.root = slot, list(prompt_ids), len(prompt_ids), root
        self.n_computed = 0             # tokens computed here or before, without those of a step in flight
        self.has_begun = False          # whether its slot was prepared
        self.uses_cache = True          # whether it may go on after what is kept of earlier sequences
        self.pages: list[int] = []
        self.node = root                # the deepest node of the prefix tree that holds one of its pages
        self.decoded: Node | None = None    # the node of the latest checkpoint that was taken while decoding
        self.target: int | None = None      # the number of the checkpoint that is taken when decoded tokens fill a page

    def follows(self, other: "Branch") -> bool:
        """Whether this prompt, which has not begun, should wait for another one: its next page is the other's next
        page, too, and would be computed twice."""
        end = other.n_computed + PAGE_TOKENS
        return (self.uses_cache and not self.has_begun and other.has_begun and self.root is other.root
                and end <= min(self.n_prompt - 1, other.n_prompt) and self.tokens[:end] == other.tokens[:end])


by_rank = operator.attrgetter("rank")


class PrefixCache:
    """Accounts for the pages: which sequence has which, and which are kept for later prompts.

    A page is free, or a running sequence owns it, or a node of the prefix tree does. A node is a full page of known
    tokens, and sequences that begin with these tokens share it. A node's checkpoint, the states after its tokens, lets
    a later sequence go on there without computing the tokens again. So a node stays as long as a running sequence
    begins with its tokens, or a checkpoint lies at the node or below it. The root needs no checkpoint: it stands for
    states of zeros.

    Prompts and decoded tokens run through different kernels, which round differently. So the bits of a page, and of the
    states after it, follow from all tokens up to its end and from which of these were decoded. Both together name a
    node: the same tokens have one node for each way in which they were computed. A running sequence shares only nodes
    whose bits it would have computed itself. There is one exception: a new prompt goes on after its longest beginning
    that has a checkpoint, even if an answer has decoded a part of it. So its bits can depend on what is cached, but not
    on the requests that run beside it. If several nodes are equally long, the one with the fewest decoded tokens
    counts.

    Sparse prompts (kernels/block_sparse.py) have other bits, and a tree of their own below a root of their own. A page
    or a checkpoint never serves a prompt of the other kind.

    When room is needed, what is worth least goes first. The worth of a checkpoint is

        tokens between it and the next checkpoint above + the floor when it was made or last used

    The first term is what would have to be computed again. The floor is the highest worth of any checkpoint that had to
    make room so far. New checkpoints start from the floor, so checkpoints that nobody uses fall behind (GreedyDual: P.
    Cao and S. Irani, "Cost-aware WWW proxy caching algorithms", 1997).

    To make room for a checkpoint, the least worthy one on the card goes to host memory. If host memory is full, its
    least worthy checkpoint is dropped, or this one if it is worth less. Running sequences that use the nodes do not
    matter: they need the pages, not the checkpoints. To make room for pages, a leaf that no running sequence uses is
    dropped with its checkpoint, and with the nodes above it that nothing else needs.

    This class only keeps accounts. `store`, a Pipeline, moves the bytes, in the order of the calls.
    """

    def __init__(self, store, n_pages: int, n_checkpoints: int, n_host: int):
        self.store, self.n_pages, self.n_checkpoints = store, n_pages, n_checkpoints
        self.free_pages, self.free_numbers, self.free_hosts = (
            list(reversed(range(n))) for n in (n_pages, n_checkpoints, n_host))
        self.roots = Node(None, (), 0, -1), Node(None, (), 0, -1)      # of dense prompts, and of sparse ones
        self.on_card: list[Node] = []       # the nodes whose checkpoint is on the card, in the order of their ranks
        self.in_host: list[Node] = []       # the nodes whose checkpoint is in host memory, likewise
        self.floor, self.n_ranked = 0, 0
        self.n_idle = 0                     # nodes that no running sequence uses
        self.n_spilled = self.n_fetched = self.n_dropped = 0

    def marks(self) -> list[int]:
        """The marks of the beginnings after which later prompts may go on. Any thread may ask; another may change them
        meanwhile."""
        return [node.mark for node in self.on_card + self.in_host]

    # ---- pages ----

    @property
    def n_available(self) -> int:
        """How many pages no running sequence has."""
        return len(self.free_pages) + self.n_idle

    def take_pages(self, count: int) -> list[int]:
        """Takes `count` free pages. Nodes that nobody uses are dropped if too few are free. Raises CardError if running
        sequences have too many."""
        while len(self.free_pages) < count:
            kept = heapq.merge(self.on_card, self.in_host, key=by_rank)
            leaf = next((node for node in kept if not node.children and not node.n_users), None)
            if leaf is None:
                raise CardError(f"{count} KV pages are needed and {len(self.free_pages)} are free")
            self._evict(leaf)
        return [self.free_pages.pop() for _ in range(count)]

    # ---- the tree ----

    def find(self, tokens: list[int], root: Node) -> tuple[Node, int]:
        """Returns (node, n). The node is the one to go on from: it is the root or has a checkpoint, and its path spells
        the longest such beginning of `tokens`. n: how many of the tokens, from the first one on, are in this root's
        tree at all."""
        nodes, found = [root], root
        for at in range(0, whole_pages(len(tokens)), PAGE_TOKENS):
            key = tuple(tokens[at:at + PAGE_TOKENS])
            below = [child for node in nodes for child in node.children.get(key, {}).values()]
            if not below:
                break
            nodes = below
            found = min((node for node in nodes if node.is_kept), key=lambda node: node.n_decoded, default=found)
        return found, nodes[0].depth * PAGE_TOKENS

    def enter(self, node: Node) -> list[int]:
        """A sequence goes on from a node's checkpoint. Returns the pages from the root to the node."""
        self.touch(node)
        path = list(node.path())
        for each in path:
            self._use(each)
        return [each.page for each in reversed(path)]

    def leave(self, branch: Branch):
        """A sequence ends. The tree owns its pages up to branch.node."""
        self.free_pages.extend(reversed(branch.pages[branch.node.depth:]))
        if branch.target is not None:
            self.free_numbers.append(branch.target)
            self.store.aim(branch.slot, None)
        for each in branch.node.path():
            each.n_users -= 1
            self.n_idle += not each.n_users
        self._prune(branch.node)

    def grow(self, node: Node, tokens: tuple[int, ...], n_prompt: int, page: int) -> Node:
        """A running sequence, whose path ends at `node`, has filled a page. Returns the page's node, new or known.

        The first n_prompt of the tokens were computed as a prompt. If the tree has such a node already, the node's page
        holds the same bits, and the sequence's own page becomes free.
        """
        alike = node.children.setdefault(tokens, {})
        if n_prompt in alike:
            self.free_pages.append(page)
        else:
            alike[n_prompt] = Node(node, tokens, n_prompt, page, node.depth + 1,
                                   node.n_decoded + PAGE_TOKENS - n_prompt, mark_after(node.mark, tokens))
            self.n_idle += 1
        self._use(alike[n_prompt])
        return alike[n_prompt]

    def tokens_left(self, branch: Branch) -> int:
        """How many tokens of a prompt are still to be computed, as far as that is known."""
        is_new = branch.uses_cache and not branch.has_begun
        n_known = self.find(branch.tokens[:-1], branch.root)[0].depth * PAGE_TOKENS if is_new else branch.n_computed
        return branch.n_prompt - n_known

    def join(self, branch: Branch, n_seen: int) -> dict[int, Node]:
        """Put the full pages of the first n_seen tokens, whose passes are queued, into the tree, as far as they are not
        on the branch yet. Returns {position: node that ends there} for these pages."""
        joined, pages = {}, list(branch.pages)
        for end in range((branch.node.depth + 1) * PAGE_TOKENS, n_seen + 1, PAGE_TOKENS):
            start, depth = end - PAGE_TOKENS, branch.node.depth
            n_prompt = min(max(branch.n_prompt - start, 0), PAGE_TOKENS)
            branch.node = joined[end] = self.grow(branch.node, tuple(branch.tokens[start:end]), n_prompt, pages[depth])
            pages[depth] = branch.node.page
        if pages != branch.pages:
            branch.pages = pages
            self.store.set_pages(branch.slot, pages)
        return joined

    def aim(self, branch: Branch):
        """The decoded tokens of a sequence may fill a page in the next step. The card then makes a checkpoint, of the
        number that this takes. One number stays for prompts: if there is no other, there is no checkpoint."""
        if branch.target is None and len(self.free_numbers) + len(self.on_card) > 1:
            branch.target = self.take_number()
            self.store.aim(branch.slot, branch.target)

    def keep_decoded(self, branch: Branch):
        """The decoded tokens of a sequence have filled a page: put it into the tree with the checkpoint after it.

        An answer keeps its latest checkpoint and those at multiples of CHECKPOINT_INTERVAL. Answers with the same
        tokens share a checkpoint, which is dropped once each of them has taken a newer one. An answer that has ended
        takes no newer one, so its latest checkpoint stays: the next turn of the conversation begins there."""
        node = self.join(branch, branch.n_computed)[branch.n_computed]
        last, branch.decoded = branch.decoded, None
        if last is not None:
            last.n_answers -= 1
            if not last.n_answers and last.depth * PAGE_TOKENS % CHECKPOINT_INTERVAL:
                self.drop(last)
        number, branch.target = branch.target, None
        if number is not None:
            self.store.aim(branch.slot, None)
            if node.is_kept:
                self.free_numbers.append(number)
            else:
                self.keep(node, number)
        if node.is_kept:
            self.touch(node)
            node.n_answers += 1
            branch.decoded = node

    def _use(self, node: Node):
        self.n_idle -= not node.n_users
        node.n_users += 1

    def _prune(self, node: Node):
        """Forget a node that nothing needs any more, and the nodes above it that only this one needed."""
        while node.parent is not None and not (node.children or node.n_users or node.is_kept):
            alike = node.parent.children[node.tokens]
            del alike[node.n_prompt]
            if not alike:
                del node.parent.children[node.tokens]
            self.free_pages.append(node.page)
            self.n_idle -= 1
            node = node.parent

    # ---- checkpoints ----

    def take_number(self) -> int | None:
        """Takes the number of a checkpoint on the card. The caller writes the checkpoint and then calls `keep`. None if
        all numbers belong to checkpoints that are being written."""
        if not self.free_numbers:
            if not self.on_card:
                return None
            self._make_room(self.on_card[0])
        return self.free_numbers.pop()

    def keep(self, node: Node, number: int):
        """Checkpoint `number`, whose writing is queued, now belongs to a node. An older one of the node is released."""
        self._forget(node)
        node.number, node.floor = number, self.floor
        self._insert(node)
        self._rank_below(node)

    def touch(self, node: Node):
        """A node's checkpoint, if it has one, is used now."""
        if node.is_kept:
            node.floor = self.floor
            self._rank(node)

    def fetch(self, node: Node) -> int | None:
        """Brings a node's checkpoint back to the card if it is in host memory. Returns its number; None for the root.
        A running sequence must use the node."""
        if node.host is not None:
            self._remove(node)
            host, node.host = node.host, None
            number = self.take_number()     # may drop other checkpoints, but not this one: it is in no order now
            self.store.fetch(host, number)
            self.free_hosts.append(host)
            self.keep(node, number)
            self.n_fetched += 1
        return node.number

    def drop(self, node: Node):
        """Forget a node's checkpoint, if it has one, and the nodes that only the checkpoint needed."""
        self._forget(node)
        self._prune(node)

    def clear(self):
        """Forget everything that no running sequence uses."""
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
        """Move a node's checkpoint to host memory. Drop it if host memory is full of more worthy ones."""
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
        """Compute a checkpoint's worth and put its node in order."""
        above = next((each.depth for each in node.parent.path() if each.is_kept), 0)
        self.n_ranked += 1
        node.rank = PAGE_TOKENS * (node.depth - above) + node.floor, self.n_ranked
        bisect.insort(self._order(node), node, key=by_rank)

    def _remove(self, node: Node):
        order = self._order(node)
        del order[bisect.bisect_left(order, node.rank, key=by_rank)]

    def _rank(self, node: Node):
        """Compute a checkpoint's worth again."""
        self._remove(node)
        self._insert(node)

    def _rank_below(self, node: Node):
        for each in node.kept_below():
            self._rank(each)


def checkpoint_positions(tokens: list[int], turn: int | None, start: int, known: int) -> list[int]:
    """Where a prompt, of which `start` tokens are cached, gets checkpoints: multiples of 64 below its length.

    Candidates are the positions where a later prompt probably differs from this one, and every multiple of
    CHECKPOINT_INTERVAL. A later prompt probably differs at the beginnings of turns (at token `turn`), at the end of the
    prompt, and at `known`, where this prompt differs from an earlier one. A candidate less than CHECKPOINT_SPACING
    behind the checkpoint before it is left out, except the end of the system prompt (where the second turn begins), the
    beginnings of the last two turns, the end of the prompt, and `known`.
    """
    turns = [whole_pages(at) for at, token in enumerate(tokens) if token == turn]
    likely = {*turns[1:2], *turns[-2:], whole_pages(len(tokens) - 1), known}
    found = [start]
    for at in sorted({*turns, *likely, *range(0, len(tokens), CHECKPOINT_INTERVAL)}):
        if start < at < len(tokens) and (at in likely or at - found[-1] >= CHECKPOINT_SPACING):
            found.append(at)
    return found[1:]
