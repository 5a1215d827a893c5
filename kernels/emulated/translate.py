"""PTX of one kernel -> LLVM IR of one function that runs one warp.

    i32 warp(ptr context, i32 warp, i32 resume)

runs warp number `warp` of a block until it ends (returns 0), reaches a barrier (returns its number; called
again with this number as `resume` it goes on from there), gives way to other warps in a loop that polls
memory (likewise, with GIVES_WAY added to the number) or traps (returns -1). What must survive a barrier is
saved in the warp's frame. The context is described by CONTEXT; the block's shape is part of the translation,
because with it most indices turn out to be one scalar plus a constant per lane.
"""

import re
from dataclasses import dataclass

from .emit import WARP, bits_of, llvm_type
from .flow import EXIT, Flow, LoopEnd, computed_from, is_barrier
from .lanes import Lanes, Shape
from .printing import Printing
from .ptx import Imm, Symbol, parse

# Byte offsets in the context that a warp is given.
CONTEXT = {"params": 0, "shared": 8, "local": 16, "frames": 24, "ctaid": 32, "nctaid": 44, "dynamic": 56,
           "barriers": 64}
CONTEXT_BYTES = 192
# A part of a block may use one of the block's 16 barriers. Two numbers for each of them lie at "barriers" in the
# context, zero when the block starts: how often the barrier was complete, and the threads that have arrived since.
BARRIERS_BYTES = 16 * 8

GIVES_WAY = 1 << 30                                 # added to what a warp returns that has not reached a barrier
_SPINS = 64                                         # rounds of polling loops after which a warp gives way

_BALLOTS = 64                                       # bytes at the start of a frame, where barriers reduce


@dataclass(frozen=True)
class Target:
    """What the CPU offers. features: as LLVM names them ("+avx512f,..."); empty for the defaults of the
    triple."""
    triple: str
    cpu: str
    features: str
    avx2: bool
    avx512: bool
    vnni: bool
    fp16: bool                                      # AVX-512's arithmetic of halves


@dataclass(frozen=True)
class Translated:
    """LLVM IR text of a module with the function `warp`, and what a launch must know."""
    ir: str
    name: str                                       # the kernel's PTX name
    block: tuple                                    # threads (x, y, z)
    params: tuple                                   # ((offset, size), ...) in the parameter buffer
    params_bytes: int
    shared_bytes: int                               # static shared memory; dynamic shared memory follows it
    local_bytes: int                                # per thread
    frame_bytes: int                                # per warp
    partial_barriers: bool                          # whether a part of the block waits at some
    spins: tuple                                    # of polling loops (number returned, line, instruction)
    notes: tuple = ()                               # what a watching translation adds, see watching.py


class Translator(Printing):
    """Emits one kernel. Blocks become labels `b<i>`, loop ends `e<header>`."""

    level = 2                                       # of optimisation

    def __init__(self, ptx, block, target):
        self.module = parse(ptx)
        self.function = self.module.entry
        self.block, self.target = tuple(block), target
        self.x86 = target.triple.startswith(("x86", "i386"))
        self.vnni, self.avx2 = target.vnni, target.avx2
        self.chains_dots = target.vnni or target.avx2
        self.cpu_gathers = self.cpu_permutes = self.cpu_rounds = target.avx512
        self.cpu_halves = target.fp16
        self.parameters, self.params, self.params_bytes = self._layout_parameters()
        self.flow = Flow(self.function.body)
        variables, shapes = self._layout_variables()
        super().__init__(Lanes(self.function, self.flow, self.block, shapes), variables)
        self.divided = frozenset(self.lanes.divided)
        self.fours = self.find_fours()
        self.block_dependent = computed_from(("%ctaid.x", "%ctaid.y", "%ctaid.z"), self.lanes.every)
        self.ends = []                              # labels at which the warp ends, not yet written
        self.resumes = []                           # labels to go on from after return 1, 2, ...
        self.spins = []
        self.n_threads = self.block[0] * self.block[1] * self.block[2]
        self.partial = self._partial_barriers()
        self.reduces = any(i.name == "barrier_result" for i in self.lanes.every)
        self.kept = self._lay_out_frame()
        self.instr = None

    # ---- layout ----

    def _layout_parameters(self):
        offsets, layout, end = {}, [], 0
        for p in self.function.params:
            at = -(-end // p.align) * p.align
            offsets[p.name] = at
            layout.append((at, p.size))
            end = at + p.size
        return offsets, tuple(layout), end

    def shared_start(self, end, align):
        """Where in shared memory an array begins, behind others that end at `end`."""
        return -(-end // align) * align

    def _layout_variables(self):
        """Addresses of variables: name -> scalar value, and their shapes; sets shared_bytes and
        local_bytes."""
        self.shared_bytes = self.local_bytes = 0
        values, shapes, self.globals = {}, {}, []
        dynamic = []
        used = {o.name for i in self.function.body if hasattr(i, "operands") for o in _symbols(i.operands)}
        for v in list(self.module.variables.values()) + self.function.variables:
            if v.name not in used or v.name in values:
                continue
            if v.space == "shared" and v.size is None:
                dynamic.append(v)
            elif v.space == "shared":
                self.shared_bytes = self.shared_start(self.shared_bytes, v.align)
                values[v.name] = self.shared_bytes
                self.shared_bytes += v.size
            elif v.space == "local":
                self.local_bytes = -(-self.local_bytes // 16) * 16
                values[v.name] = ("local", self.local_bytes)
                self.local_bytes += v.size
            elif v.space in ("global", "const"):
                values[v.name] = ("global", len(self.globals))
                self.globals.append(v)
        self.shared_bytes = -(-self.shared_bytes // 16) * 16 if dynamic else self.shared_bytes
        for v in dynamic:
            values[v.name] = self.shared_bytes
        self.local_bytes = -(-self.local_bytes // 16) * 16
        for name, value in values.items():
            local = isinstance(value, tuple) and value[0] == "local"
            shapes[name] = Shape(tuple(lane * self.local_bytes for lane in range(WARP))) if local else Shape()
        self.places = values
        return {name: f"%var{i}" for i, name in enumerate(values)}, shapes

    def _lay_out_frame(self):
        """Places in the warp's frame of the vectors that are needed where the warp may pause: register -> offset.
        These vectors are in the frame all the time. Sets frame_bytes, which grows with the scalars that are saved
        behind them."""
        self.frame_bytes, kept = _BALLOTS if self.reduces else 0, {}
        pauses = [(b, b.targets[0]) for b in self.flow.blocks if b.end is not None and is_barrier(b.end)]
        pauses += [(self.flow.blocks[header], header) for header in self.flow.spins]
        live = set().union(*(self._live_after(*pause) for pause in pauses))
        for register in self.slots:
            holder, n = self.holder(register)
            if register in live and self.lanes.vector(register) and holder not in kept:
                kept[holder] = self.frame_bytes
                self.frame_bytes += max(n * bits_of(llvm_type(self.registers[register])) // 8, 64)
        self.scalars_at = self.frame_bytes
        return kept

    def _live_after(self, block, target):
        """The registers that a warp needs when it pauses in a block and goes on at another one."""
        return set().union(*(self.flow.blocks[i].live_in for i in (*self.flow.waiting[block.index], target)))

    # ---- the function ----

    def translate(self):
        body = self._body()
        attributes = (f'nounwind alignstack=64 "prefer-vector-width"="512" "min-legal-vector-width"="512"'
                      f' "target-cpu"="{self.target.cpu}" "target-features"="{self.target.features}"')
        ir = "\n".join([f'target triple = "{self.target.triple}"', *self._global_lines(), "",
                        *self._head(), *self._entry(), *body, "}", "",
                        *self.declarations.values(), f"attributes #0 = {{ {attributes} }}",
                        f"attributes #1 = {{ noinline strictfp {attributes} }}",
                        f"attributes #2 = {{ noinline {attributes} }}", "!0 = !{}"])
        return Translated(ir, self.function.name, self.block, self.params, self.params_bytes,
                          self.shared_bytes,
                          self.local_bytes, self.frame_bytes, bool(self.partial), tuple(self.spins))

    def _global_lines(self):
        for i, v in enumerate(self.globals):
            data = "".join(f"\\{b:02X}" for b in v.data or bytes(v.size))
            yield f'@g{i} = internal global [{v.size} x i8] c"{data}", align {max(v.align, 16)}'

    def _body(self):
        for node in self.flow.order:
            if isinstance(node, LoopEnd):
                self._loop_end(node)
            else:
                self._block(node)
        self._end()
        lines, self.lines = self.lines, []
        return lines

    def _head(self):
        """The first lines of the function. If the warp may pause, the kernel's code is an inner function `resume`,
        which is given the warp's frame, and LLVM is told that no pointer of the kernel leads to the frame."""
        if not self.resumes:
            return ["define i32 @warp(ptr %context, i32 %warp, i32 %resume) #0 {"]
        self.label("entry")
        self.do(f"%frames.place = getelementptr i8, ptr %context, i64 {CONTEXT['frames']}")
        self.do("%frames = load ptr, ptr %frames.place")
        self.do("%warp64 = zext i32 %warp to i64")
        self.do(f"%offset = mul i64 %warp64, {self.frame_bytes}")
        self.do("%frame = getelementptr i8, ptr %frames, i64 %offset")
        self.do("%state = call i32 @resume(ptr %context, i32 %warp, i32 %resume, ptr align 64 %frame)")
        self.do("ret i32 %state")
        lines, self.lines = self.lines, []
        return ["define i32 @warp(ptr %context, i32 %warp, i32 %resume) #0 {", *lines, "}", "",
                "define internal i32 @resume(ptr %context, i32 %warp, i32 %resume, "
                "ptr noalias align 64 %frame) noinline #0 {"]

    def _end(self):
        """Ends the warp, unless lanes still try to get a lock."""
        self.label("finish")
        self._let_others_lock(EXIT)
        self.do("ret i32 0")

    def _let_others_lock(self, place):
        """Where lanes meet after a lock: goes back to the lock's loop while some lanes still try."""
        for header in sorted(h for h, meeting in self.flow.locks.items()
                             if meeting == place and h in self.flow.masked):
            self.n += 1
            self.do(f"br i1 {self._waits(header)}, label %b{header}, label %unlocked{self.n}")
            self.label(f"unlocked{self.n}")

    def _waits(self, header):
        """Whether lanes wait at a block."""
        return self.compare("ne", "i32", 1, self.let(f"load i32, ptr %waiting{header}"), "0")

    def _entry(self):
        """Storage for registers and waiting lanes, addresses, then the jump to where the warp goes on."""
        self.label("entry")
        for name, offset in CONTEXT.items():
            self.do(f"%{name}.place = getelementptr i8, ptr %context, i64 {offset}")
        for i, axis in enumerate("xyz"):
            for name in ("ctaid", "nctaid"):
                self.do(f"%{name}.{axis}.place = getelementptr i8, ptr %context, i64 {CONTEXT[name] + 4 * i}")
        for name in ("params", "shared", "local", "frames"):
            self.do(f"%{name} = load ptr, ptr %{name}.place")
        self.do("%nowhere = alloca [16 x i8], align 16")
        self.do(f"%board = alloca <{WARP} x i32>")
        self.do(f"%first_thread = mul i32 %warp, {WARP}")
        self._start_mask()
        for register, slot in self.slots.items():
            t = llvm_type(self.registers[register])
            if self.lanes.scalar(register):
                self.do(f"{slot}.s = alloca {t}")
            if register in self.kept:
                self.do(f"{slot}.v = getelementptr i8, ptr %frame, i64 {self.kept[register]}")
            elif self.lanes.vector(register) and self.holder(register)[0] == register:
                self.do(f"{slot}.v = alloca <{self.holder(register)[1]} x {t}>, align 64")
        if self.partial:
            self.do("%turn = alloca i32")
        if self.flow.spins:
            self.do("%spins = alloca i32")
            self.do("store i32 0, ptr %spins")
        for block in sorted(self.flow.masked):
            self.do(f"%waiting{block} = alloca i32")
            self.do(f"store i32 0, ptr %waiting{block}")
        self._variable_addresses()
        if self.reduces:
            for warp, frame in enumerate(self._frames_of_warps()):
                self.do(f"{frame} = getelementptr i8, ptr %frames, i64 {warp * self.frame_bytes}")
            self.do("%warp64 = zext i32 %warp to i64")
            self.do(f"%ballots.offset = mul i64 %warp64, {self.frame_bytes}")
            self.do("%ballots = getelementptr i8, ptr %frames, i64 %ballots.offset")
        cases = " ".join(f"i32 {i + 1}, label %{label}" for i, label in enumerate(self.resumes))
        self.do(f"switch i32 %resume, label %start [{cases}]")
        self.label("start")
        self._start_undefined()
        if self.reduces:
            self._start_reductions()
        self.do("br label %b0")
        lines, self.lines = self.lines, []
        return lines

    def _start_undefined(self):
        """Registers that may be read before they are written start as zero. LLVM may give them any value otherwise."""
        for register in sorted(self.flow.blocks[0].live_in & self.registers.keys()):
            t, (holder, n) = llvm_type(self.registers[register]), self.holder(register)
            if self.lanes.scalar(register):
                self.do(f"store {t} zeroinitializer, ptr {self.slots[register]}.s")
            if self.lanes.vector(register):
                self.do(f"store <{n} x {t}> zeroinitializer, ptr {self.slots[holder]}.v, align 64")

    def _start_mask(self):
        """%everyone: the lanes that exist; a block's last warp may be incomplete."""
        if self.n_threads % WARP:
            last = self.n_threads // WARP
            self.do(f"%incomplete = icmp eq i32 %warp, {last}")
            self.do(f"%everyone = select i1 %incomplete, i32 {(1 << self.n_threads % WARP) - 1}, i32 -1")

    @property
    def start_mask(self):
        return "%everyone" if self.n_threads % WARP else None

    def _variable_addresses(self):
        shared, local = self.let("ptrtoint ptr %shared to i64"), self.let("ptrtoint ptr %local to i64")
        thread = self.let("zext i32 %first_thread to i64")
        local = self.op("add", "i64", 1, local, self.op("mul", "i64", 1, thread, str(self.local_bytes)))
        for (name, value), variable in zip(self.places.items(), self.variables.values()):
            if isinstance(value, int):
                self.do(f"{variable} = add i64 {shared}, {value}")
            elif value[0] == "local":
                self.do(f"{variable} = add i64 {local}, {value[1]}")
            else:
                self.do(f"{variable} = ptrtoint ptr @g{value[1]} to i64")

    # ---- blocks ----

    def _block(self, index):
        block = self.flow.blocks[index]
        self.label(f"b{index}")
        self._let_others_lock(index)
        if index in self.flow.spins:
            self._give_way(index)
        self.mask = self.start_mask
        if index in self.flow.masked:
            self.mask = self.let(f"load i32, ptr %waiting{index}")
            self.do(f"store i32 0, ptr %waiting{index}")
            none = self.compare("eq", "i32", 1, self.mask, "0")
            self.do(f"br i1 {none}, label %{self._after(index)}, label %b{index}.run")
            self.label(f"b{index}.run")
        self.quads, self.repeats, self.choices = {}, {}, {}
        self.in_loop = any(index in loop for loop in self.flow.loops.values())
        self.find_dot_chains(block.instrs)
        self.find_joined_loads(block)
        self.find_short_sums(block.instrs)
        for instr in block.instrs:
            self.instr, self.leaving = instr, self.results.leaving(instr)
            handler = getattr(self, "op_" + instr.name, None)
            if handler is None:
                raise instr.unsupported()
            self.note_instruction(instr)
            for register in instr.written:
                self.quads.pop(register, None)
                self.choices.pop(register, None)
            try:
                handler(instr)
            except (KeyError, ValueError, IndexError, AttributeError, TypeError, StopIteration) as error:
                raise instr.unsupported(f"{type(error).__name__}: {error}") from error
        self._terminate(block)

    def _label(self, node):
        if node is None:
            return "done"
        return f"e{node.header}" if isinstance(node, LoopEnd) else f"b{node}"

    def _after(self, node):
        following = self.flow.next_from(node)
        return self._done() if following is None else self._label(following)

    def _done(self):
        """A label that ends the warp."""
        self.n += 1
        name = f"done{self.n}"
        self.ends.append(name)
        return name

    def _wait(self, target, lanes):
        """Adds lanes to those waiting at a block."""
        if target in self.flow.masked:
            old = self.let(f"load i32, ptr %waiting{target}")
            new = self.op("or", "i32", 1, old, lanes)
            self.do(f"store i32 {new}, ptr %waiting{target}")

    def _go(self, node, target):
        """All running lanes go to `target`: directly, or by way of blocks where others wait."""
        self._wait(target, self.mask or "-1")
        self.do(f"br label %{self._label(self.flow.next_from(node, target))}")

    def _terminate(self, block):
        end = block.end
        self.instr, self.leaving = end, {}
        if end is not None and end.name == "trap":
            self.do("ret i32 -1")
        elif not block.targets:
            self.do(f"br label %{self._after(block.index)}")
        elif end is not None and is_barrier(end):
            self._barrier(block)
        elif len(block.targets) == 1 or block.targets[0] == block.targets[1]:
            self._go(block.index, block.targets[0])
        elif block.index in self.flow.branches:
            self._divergent_branch(block)
        else:
            self._uniform_branch(block)
        self._flush_done()

    def _flush_done(self):
        for name in self.ends:
            self.label(name)
            self.do("br label %finish")
        self.ends = []

    def _condition(self, end, w):
        register, negated = end.guard
        value = self.get(register, "i1", w)
        return self.op("xor", "i1", w, value, "true" if w == 1 else "splat (i1 true)") if negated else value

    def _uniform_branch(self, block):
        condition = self._condition(block.end, 1)
        self.n += 1
        names = [f"b{block.index}.{way}{self.n}" for way in ("taken", "else")]
        self.do(f"br i1 {condition}, label %{names[0]}, label %{names[1]}")
        for name, target in zip(names, block.targets):
            self.label(name)
            self._go(block.index, target)

    def _divergent_branch(self, block):
        mask = self.mask or "-1"
        taken = self.op("and", "i32", 1, self.mask_bits(self._condition(block.end, WARP)), mask)
        rest = self.op("xor", "i32", 1, taken, mask)
        for target, lanes in zip(block.targets, (taken, rest)):
            self._wait(target, lanes)
        self.do(f"br label %{self._after(block.index)}")

    def _loop_end(self, node):
        """Back to the header if lanes wait there."""
        self.label(self._label(node))
        after = self._after(node)
        if node.header not in self.flow.masked:
            self.do(f"br label %{after}")
        else:
            again = self._waits(node.header)
            if node.header in self.flow.locks:
                again = self.op("and", "i1", 1, again, self._nobody_waits_after(node))
            self.do(f"br i1 {again}, label %b{node.header}, label %{after}")
        self._flush_done()

    def _nobody_waits_after(self, node):
        """Whether no lanes wait that have left a lock's loop and are on the way to where all lanes meet."""
        loop, waiting = self.flow.loops[node.header], "0"
        places = set().union(*(self.flow.waiting[b] for b in loop)) - loop - {self.flow.locks[node.header]}
        for place in sorted(places & self.flow.masked):
            waiting = self.op("or", "i32", 1, waiting, self.let(f"load i32, ptr %waiting{place}"))
        return self.compare("eq", "i32", 1, waiting, "0")

    # ---- barriers, and where a warp gives way ----

    def _give_way(self, header):
        """At the head of a loop that polls memory: every few rounds the warp gives way to other warps, which may
        write what the loop waits for."""
        count = self.op("add", "i32", 1, self.let("load i32, ptr %spins"), "1")
        self.do(f"store i32 {count}, ptr %spins")
        enough = self.compare("eq", "i32", 1, count, str(_SPINS))
        self.do(f"br i1 {enough}, label %b{header}.way, label %b{header}.on")
        self.label(f"b{header}.way")
        number = self._pause(self._saved(self.flow.blocks[header], header), GIVES_WAY)
        self.spins.append((number, self.flow.spins[header].line, self.flow.spins[header].text))
        self.do(f"br label %b{header}.on")
        self.label(f"b{header}.on")

    def _barrier(self, block):
        end, target = block.end, block.targets[0]
        if "red" in end.mods:
            self._cast_ballot(end.operands[-1])
        self._wait(target, self.mask or "-1")
        if self._of_all(end) and end.operands[0].value not in self.partial:
            self._pause(self._saved(block, target))
        elif end.mods[:1] in (("sync",), ("arrive",)):
            self._partial_barrier(end, self._saved(block, target))
        else:
            raise end.unsupported("a barrier that reduces, of a part of the block")
        self.do(f"br label %{self._label(self.flow.next_from(block.index, target))}")

    def _of_all(self, end):
        """Whether a barrier is one for all threads of the block."""
        number, *rest = end.operands[:-1] if "red" in end.mods else end.operands
        everyone = [[], [Imm(-(-self.n_threads // WARP) * WARP)]]
        return end.mods[:1] in (("sync",), ("red",)) and isinstance(number, Imm) and rest in everyone

    def _partial_barriers(self):
        """The numbers of the barriers at which only a part of the block waits; all numbers, if some of them are not
        known."""
        partial = [i for i in self.lanes.every if is_barrier(i) and not self._of_all(i)]
        numbers = {i.operands[0].value if isinstance(i.operands[0], Imm) else None for i in partial}
        return range(16) if None in numbers else numbers

    def _partial_barrier(self, end, saved):
        """A warp that arrives adds its threads. The last warp to arrive lets all go on; until then the others give
        way."""
        number, *rest = end.operands
        needed = self._of_warp(rest[0]) if rest else str(-(-self.n_threads // WARP) * WARP)
        offset = self.op("mul", "i32", 1, self._of_warp(number), "8")
        turns = self.let(f"getelementptr i8, ptr %barriers.place, i32 {offset}")
        threads = self.let(f"getelementptr i8, ptr {turns}, i64 4")
        turn = self.let(f"load i32, ptr {turns}")
        arrived = self.op("add", "i32", 1, self.let(f"load i32, ptr {threads}"), str(WARP))
        complete = self.compare("uge", "i32", 1, arrived, needed)
        self.do(f"store i32 {self.select('i32', 1, complete, '0', arrived)}, ptr {threads}")
        next_turn = self.op("add", "i32", 1, turn, self.resize("i1", "i32", 1, complete))
        self.do(f"store i32 {next_turn}, ptr {turns}")
        self.note_partial_barrier(complete)
        if "arrive" in end.mods:
            return
        self.do(f"store i32 {turn}, ptr %turn")
        self.n += 1
        tag = f"barrier{self.n}"
        self.do(f"br i1 {complete}, label %{tag}.on, label %{tag}.wait")
        self.label(f"{tag}.wait")
        resumed = self._pause([("%turn", "i32"), *saved], GIVES_WAY)
        self.spins.append((resumed, end.line, end.text))
        offset = self.op("mul", "i32", 1, self._of_warp(number), "8")
        turns = self.let(f"getelementptr i8, ptr %barriers.place, i32 {offset}")
        same = self.compare("eq", "i32", 1, self.let(f"load i32, ptr {turns}"),
                            self.let("load i32, ptr %turn"))
        self.do(f"br i1 {same}, label %{tag}.wait, label %{tag}.on")
        self.label(f"{tag}.on")

    def _of_warp(self, operand):
        """The value of an operand that is the same for all running lanes."""
        if self.uniform(operand):
            return self.scalar(operand, "i32")
        lane = self.call("llvm.cttz.i32", "i32", ("i32", self.mask or "-1"), ("i1", "true"))
        return self.let(f"extractelement <{WARP} x i32> {self.vector(operand, 'i32')}, i32 {lane}")

    def _pause(self, saved, flag=0):
        """Saves storage [(place, type)], returns from the function, and restores the storage when the function is
        called again. Returns the number of this way back."""
        number = len(self.resumes) + 1
        moves = [(self.scalars_at + 8 * i, *storage) for i, storage in enumerate(saved)]
        self.frame_bytes = max(self.frame_bytes, -(-(self.scalars_at + 8 * len(moves)) // 64) * 64)
        for offset, place, t in moves:
            value = self.let(f"load {t}, ptr {place}")
            pointer = self.let(f"getelementptr i8, ptr %frame, i64 {offset}")
            self.do(f"store {t} {value}, ptr {pointer}, align 8")
        self.do(f"ret i32 {number | flag}")
        self.label(f"resume{number}")
        self.resumes.append(f"resume{number}")
        for offset, place, t in moves:
            pointer = self.let(f"getelementptr i8, ptr %frame, i64 {offset}")
            value = self.let(f"load {t}, ptr {pointer}, align 8")
            self.do(f"store {t} {value}, ptr {place}")
        return number

    # A barrier that reduces: every warp leaves a ballot at the start of its frame. A ballot holds the number of this
    # barrier among those that reduce, how many lanes vote, and how many of them vote yes. Even and odd barriers use
    # different places, because a warp may be at the next barrier while others still count. A ballot with another
    # number does not count: its warp has returned.

    def _start_reductions(self):
        self.do(f"store <{_BALLOTS // 4} x i32> zeroinitializer, ptr %ballots, align 64")

    def _ballot_place(self, frame, number):
        odd = self.resize("i32", "i64", 1, self.op("and", "i32", 1, number, "1"))
        offset = self.op("add", "i64", 1, self.op("shl", "i64", 1, odd, "4"), "16")
        return self.let(f"getelementptr i8, ptr {frame}, i64 {offset}")

    def _cast_ballot(self, vote):
        number = self.op("add", "i32", 1, self.let("load i32, ptr %ballots"), "1")
        self.do(f"store i32 {number}, ptr %ballots")
        ballot = "zeroinitializer"
        for i, value in enumerate((number, self._count(self.mask or "-1"), self._count(self._ballot(vote)))):
            ballot = self.let(f"insertelement <4 x i32> {ballot}, i32 {value}, i64 {i}")
        self.do(f"store <4 x i32> {ballot}, ptr {self._ballot_place('%ballots', number)}, align 16")

    def _count(self, lanes):
        return self.call("llvm.ctpop.i32", "i32", ("i32", lanes))

    def op_barrier_result(self, instr):
        """The result of a `bar.red`, after the barrier: counts the ballots of all warps."""
        number, total = self.let("load i32, ptr %ballots"), "zeroinitializer"
        for frame in self._frames_of_warps():
            ballot = self.let(f"load <4 x i32>, ptr {self._ballot_place(frame, number)}, align 16")
            counts = self.compare("eq", "i32", 1, self.let(f"extractelement <4 x i32> {ballot}, i64 0"),
                                  number)
            total = self.op("add", "<4 x i32>", 1, total,
                            self.select("<4 x i32>", 1, counts, ballot, "zeroinitializer"))
        lanes, yes = (self.let(f"extractelement <4 x i32> {total}, i64 {i}") for i in (1, 2))
        result = {"popc": lambda: ("i32", yes),
                  "and": lambda: ("i1", self.compare("eq", "i32", 1, yes, lanes)),
                  "or": lambda: ("i1", self.compare("ne", "i32", 1, yes, "0"))}[instr.mods[1]]()
        self.put(instr.operands[0], result[0], 1, result[1])

    def _frames_of_warps(self):
        return [f"%frame.{warp}" for warp in range(-(-self.n_threads // WARP))]

    def _saved(self, block, target):
        """[(storage, type)] of the scalars and waiting lanes that a warp needs after a pause."""
        live = self._live_after(block, target)
        saved = [(f"{slot}.s", llvm_type(self.registers[r])) for r, slot in self.slots.items()
                 if r in live and self.lanes.scalar(r)]
        waiting = (self.flow.waiting[block.index] | {target}) & self.flow.masked
        return saved + [(f"%waiting{w}", "i32") for w in sorted(waiting)]

    # ---- hooks for counters and checks ----

    def note_instruction(self, instr):
        """Called before each instruction. Counters override it."""

    def note_partial_barrier(self, complete):
        """Called where a warp arrives at a barrier of a part of the block. complete: whether this warp is the last
        to arrive."""

    def note_access(self, instr, place, size):
        """Called before each memory access of `size` bytes per lane. Counters and checks override it."""


def _symbols(operands):
    for o in operands:
        if isinstance(o, Symbol):
            yield o
        elif hasattr(o, "base"):
            yield from _symbols((o.base,))
        elif hasattr(o, "items"):
            yield from _symbols(o.items)


def static_shared_bytes(ptx):
    """Bytes of static shared memory that a block of this PTX needs."""
    end = 0
    for align, size in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+[\w$]+\[(\d+)\]", ptx):
        end = -(-end // int(align)) * int(align) + int(size)
    return end


def translate(ptx, block, target, translator=Translator):
    """PTX text of a module with one kernel -> Translated, for blocks of (x, y, z) threads on a Target.

    Raises Unsupported, naming the instruction and its source line, for anything unknown."""
    return translator(ptx, block, target).translate()
