"""Control flow of one kernel: basic blocks, liveness, the order of emission, and where lanes may wait.

A warp runs block by block in one fixed order, topological with every loop in one piece. After a branch on
which the lanes disagree, the lanes that are not running *wait* at the block they branched to, and the warp
visits the waiting blocks in order, so all lanes meet again at the latest at the branch's post-dominator. For
each divergent branch

    region(B)     the blocks that may run before all lanes of B have met again
    meeting(B)    the immediate post-dominator of B, where they meet (EXIT when some lane may return before)

Everything below follows from these: which blocks need a mask (`masked`), which blocks may have waiting lanes
while a block runs (`waiting`), where to go on from a block (`next_from`), and which registers differ between
lanes merely because lanes took different ways (`divided`).

A loop that polls memory (`spins`) may wait for another warp: it gives way from time to time. If it is a lock
(`locks`) it may wait for a lane of its own warp, one that has left the loop: those lanes then run first, past
the place where they open the lock, to the first where the warp synchronizes or to the end of the kernel.
"""

from dataclasses import dataclass, field

from .ptx import Instr, Label, Mem, Symbol, Unsupported

EXIT = -1
WRITES = {"st", "atom", "red"}
ENDS_BLOCK = {"bra", "ret", "exit", "trap"}         # and barriers, see is_barrier


def computed_from(registers, instrs):
    """The names of these registers and of all registers that are computed from them, directly or by way of others."""
    found, before = set(registers), 0
    while len(found) > before:
        before = len(found)
        for instr in instrs:
            if not found.isdisjoint(instr.reads):
                found.update(instr.written)
    return found


@dataclass
class Block:
    index: int
    instrs: list = field(default_factory=list)      # without the terminator
    end: Instr | None = None                        # bra, bar, ret, exit, trap; None falls through
    targets: list = field(default_factory=list)     # successors; a conditional branch: [taken, not taken]
    live_in: set = field(default_factory=set)
    live_out: set = field(default_factory=set)


@dataclass(frozen=True)
class LoopEnd:
    """The place after the last block of the loop with this header."""
    header: int


def is_barrier(instr):
    return instr.name in ("bar", "barrier") and "warp" not in instr.mods


def synchronizes(instr):
    """Whether lanes wait for each other here."""
    return "sync" in instr.mods or is_barrier(instr)


class Flow:
    """The control-flow graph of a function's body. Divergent branches are told later, through `diverge`."""

    def __init__(self, body):
        self.blocks = self._cut(body)
        self._liveness()
        self.meeting = self._post_dominators()
        self.order = []
        self.loops = {}                             # header -> set of blocks
        self._arrange(set(range(len(self.blocks))), 0, set())
        self.position = {node: i for i, node in enumerate(self.order)}
        self.spins, self.locks = {}, {}             # header -> an instruction that polls; where lanes meet
        self._find_spins()
        self.branches = {}                          # divergent branch -> (region, meeting)
        self.waiting = {b.index: set() for b in self.blocks}
        self.masked = set()

    def _cut(self, body):
        blocks, names = [Block(0)], {}
        may_lock = any(getattr(item, "name", "") == "atom" for item in body)
        for item in body:
            block = blocks[-1]
            if isinstance(item, Label):
                if block.instrs or block.end or not names and block.index == 0:
                    blocks.append(block := Block(len(blocks)))
                names[item.name] = block.index
                continue
            opened = may_lock and synchronizes(item) and any(i.name in WRITES for i in block.instrs)
            if block.end or opened:                 # between a lock and a barrier lanes may have to meet
                blocks.append(block := Block(len(blocks)))
            if item.name in ENDS_BLOCK or is_barrier(item):
                block.end = item
            else:
                block.instrs.append(item)
        for block in blocks:
            following = [block.index + 1] if block.index + 1 < len(blocks) else []
            end = block.end
            if end is None or is_barrier(end):
                block.targets = following
            elif end.name == "bra":
                if not isinstance(end.operands[0], Symbol) or end.operands[0].name not in names:
                    raise end.unsupported("a branch to an unknown label")
                block.targets = [names[end.operands[0].name]] + (following if end.guard else [])
        return self._reachable(blocks)

    def _reachable(self, blocks):
        seen, todo = {0}, [0]
        while todo:
            for t in blocks[todo.pop()].targets:
                if t not in seen:
                    seen.add(t)
                    todo.append(t)
        new = {old: i for i, old in enumerate(sorted(seen))}
        kept = [blocks[old] for old in sorted(seen)]
        for block in kept:
            block.index, block.targets = new[block.index], [new[t] for t in block.targets]
        return kept

    def _liveness(self):
        use, define = {}, {}
        for block in self.blocks:
            used, defined = set(), set()
            for instr in block.instrs + ([block.end] if block.end else []):
                used |= {r for r in instr.reads if r not in defined}
                defined |= set(instr.written)
            use[block.index], define[block.index] = used, defined
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                out = set().union(*(self.blocks[t].live_in
                                    for t in block.targets)) if block.targets else set()
                live = use[block.index] | (out - define[block.index])
                if live != block.live_in or out != block.live_out:
                    block.live_in, block.live_out, changed = live, out, True

    def _post_dominators(self):
        every = {b.index for b in self.blocks} | {EXIT}
        after = {i: set(every) for i in every}
        after[EXIT] = {EXIT}
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                targets = block.targets or [EXIT]
                new = set.intersection(*(after[t] for t in targets)) | {block.index}
                if new != after[block.index]:
                    after[block.index], changed = new, True
        # The immediate one is the strict post-dominator that all the others post-dominate.
        return {b.index: max(after[b.index] - {b.index}, key=lambda i: len(after[i]), default=EXIT)
                for b in self.blocks}

    def _arrange(self, nodes, entry, headers):
        """Appends `nodes` to the order: topologically, with every loop in one piece. They are entered at `entry`,
        whose incoming edges are ignored."""
        for component in _components(nodes, entry, lambda i: [t for t in self.blocks[i].targets
                                                               if t in nodes and t not in headers]):
            looping = len(component) > 1 or any(i in self.blocks[i].targets for i in component) \
                and not component <= headers
            if not looping:
                self.order += component
                continue
            entered = {t for b in self.blocks if b.index not in component
                       for t in b.targets if t in component}
            header = 0 if 0 in component else min(entered)
            if len(entered | {header}) != 1:
                raise Unsupported(f"a loop that is entered at {len(entered)} places")
            self.loops[header] = set(component)
            self._arrange(set(component), header, headers | {header})
            self.order.append(LoopEnd(header))

    def _find_spins(self):
        """Finds the loops that poll: they ask again and again whether another thread has written something."""
        used = {r for b in self.blocks for i in self._all(b.index) for r in i.reads}
        for header, loop in self.loops.items():
            instrs = [i for b in sorted(loop) for i in self._all(b)]
            polls = [i for i in instrs if i.name == "atom" and used & set(i.written) or
                     i.name == "ld" and {"volatile", "relaxed", "acquire"} & set(i.mods)]
            polls = polls or _plain_polls(instrs)
            if polls:
                self.spins[header] = polls[0]
                meeting = self._meeting_after_lock(header, polls)
                if meeting is not None:
                    self.locks[header] = meeting

    def _meeting_after_lock(self, header, polls):
        """If this loop takes a lock: where its lanes meet again, which is the last place that all of them come to
        before any synchronization. It is a lock if lanes write, on the way there, what the loop polls; else the
        result is None. The lane that holds a lock must go on while other lanes of its warp still try."""
        loop = self.loops[header]
        if any(synchronizes(i) for b in loop for i in self._all(b)):
            return None
        left = {t for b in loop for t in self.blocks[b].targets} - loop
        polled, place, found = _places(polls), header, None
        while place != EXIT:
            place = self.meeting[place]
            way = set().union(*(self._reach(t, place) for t in left)) - loop - {place}
            instrs = [i for b in way for i in self._all(b)]
            if any(map(synchronizes, instrs)):
                break
            if polled & _places(i for i in instrs if i.name in WRITES):
                found = place
        return found

    def diverge(self, branch):
        """Notes that lanes may disagree at the end of block `branch`. Returns the registers that differ between
        lanes because of it."""
        left = [place for header, place in self.locks.items() if branch in self.loops[header]
                and not self.loops[header].issuperset(self.blocks[branch].targets)]
        meeting = left[0] if left else self.meeting[branch]
        sides = [self._reach(t, meeting) for t in self.blocks[branch].targets]
        region = set().union(*sides) - {meeting}
        self.branches[branch] = (region, meeting)
        places = (region | {meeting}) - {EXIT}
        for block in region | {branch}:
            self.waiting[block] |= places
        self.masked |= region
        if meeting != EXIT and self.position[meeting] <= self.position[branch]:
            self.masked.add(meeting)                # a loop's head: the loop's end looks for lanes there
        return self._divided(sides, meeting)

    def _reach(self, start, meeting):
        seen, todo = {start}, [start]
        while todo:
            block = todo.pop()
            if block == meeting:
                continue
            for t in self.blocks[block].targets:
                if t not in seen:
                    seen.add(t)
                    todo.append(t)
        return seen

    def _divided(self, sides, meeting):
        """Registers written on one side of a branch and live on the other, or where the sides meet."""
        written = [{r for b in side - {meeting} for i in self._all(b) for r in i.written}
                   for side in sides]
        live = [set().union(*(self.blocks[b].live_in for b in side)) for side in sides]
        if len(sides) == 1:
            return set()
        return (written[0] & live[1]) | (written[1] & live[0])

    def _all(self, index):
        block = self.blocks[index]
        return block.instrs + ([block.end] if block.end else [])

    def next_from(self, node, target=None):
        """The next node after `node`, a block or loop end, that may have lanes to run; None if there is none. With
        `target`, the first such node on the way to it. The way to a target that lies before `node` leads to its
        LoopEnd, or straight to the target."""
        if isinstance(node, LoopEnd):
            waiting = set().union(*(self.waiting[b] for b in self.loops[node.header]))
        else:
            waiting = self.waiting[node]
        backward = target is not None and self.position[target] <= self.position[node]
        for later in self.order[self.position[node] + 1:]:
            if isinstance(later, LoopEnd):
                if later.header in waiting and not (isinstance(node, LoopEnd)
                                                    and later.header == node.header):
                    return later
                if backward and later.header == target:
                    return target
            elif later == target or later in waiting:
                return later
        return None


def _plain_polls(instrs):
    """The ordinary loads that decide where a loop of these instructions goes on, if something makes the loop load
    the same place again. That is a fence or a nanosleep, or a syncwarp in a loop that writes no memory."""
    names = {i.name for i in instrs}
    repeats = names & {"membar", "fence", "nanosleep"} or \
        not names & WRITES and any("warp" in i.mods and i.name in ("bar", "barrier") for i in instrs)
    loads = [i for i in instrs if i.name == "ld" and not {"param", "const", "local", "nc"} & set(i.mods)]
    if not (repeats and loads):
        return []
    decides = {i.guard[0].name for i in instrs if i.guard}
    return [i for i in loads if decides & computed_from(i.written, instrs)]


def _places(instrs):
    """The places in memory that instructions name."""
    return {o for i in instrs for o in i.operands if isinstance(o, Mem)}


def _components(nodes, entry, successors):
    """Strongly connected components reachable from `entry`, in topological order (Tarjan, without
    recursion)."""
    index, low, on_stack, stack, found = {}, {}, set(), [], []
    for root in [entry] + sorted(nodes):
        if root in index:
            continue
        work = [(root, iter(successors(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, following = work[-1]
            for t in following:
                if t not in index:
                    index[t] = low[t] = len(index)
                    stack.append(t)
                    on_stack.add(t)
                    work.append((t, iter(successors(t))))
                    break
                if t in on_stack:
                    low[node] = min(low[node], index[t])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                        if member == node:
                            break
                    found.append(component)
    return found[::-1]
