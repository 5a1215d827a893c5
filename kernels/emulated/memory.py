"""Memory accesses, and the instructions through which lanes of a warp see each other.

A generic address is a host address: shared and local memory have real addresses too, so `cvta` is the
identity and all spaces are accessed alike. An access whose address is a scalar plus a constant pattern
becomes one scalar access (all lanes alike) or vector accesses (neighbouring lanes); any other one goes lane
by lane (gather, scatter).
"""

from collections import Counter

from .emit import WARP, Repeat, const, llvm_type, suffix, ty, vector_const
from .ptx import SIZES, Mem, Pack, Pair, Reg
from .special import Special

_LOAD_MODS = {"global", "shared", "local", "param", "const", "nc", "volatile", "relaxed", "acquire",
              "release", "weak", "gpu", "sys", "cta", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "v2", "v4",
              "L1::no_allocate", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L2::128B",
              "L2::256B", "L2::64B", "async"}
_ATOMIC = {"add": "add", "and": "and", "or": "or", "xor": "xor", "exch": "xchg", "min": "umin", "max": "umax",
           "inc": "uinc_wrap", "dec": "udec_wrap"}
# How many bytes ahead to fetch into the L1 and into the L2 cache, behind loads of a warp that have at least so many
# bytes. The distances are no multiples of a load's size, since loads of several sizes may take turns in one row.
_AHEAD = (128, 1 << 10, 16 << 10), (0, 64, 1 << 10)
_ATOM_MODS = {"global", "shared", "relaxed", "acquire", "release", "acq_rel", "gpu", "sys", "cta", "noftz"}


class Memory(Special):
    """Loads, stores, atomics, shuffles and votes."""

    # ---- addresses ----

    def _pattern(self, place):
        """The constant offsets of the lanes' addresses, or None if they are not known."""
        shape = self.lanes.of(place.base)
        return None if shape is None or shape.varying else shape.pattern

    def _scalar_address(self, place, offset=0):
        base = self.scalar(place.base, "i64")
        total = place.offset + offset
        return self.op("add", "i64", 1, base, str(total)) if total else base

    def _lane_pointers(self, place, offset=0):
        base = self.vector(place.base, "i64")
        total = place.offset + offset
        return self.pointer(WARP,
                            self.op("add", "i64", WARP, base, const("i64", WARP, total)) if total else base)

    def _places(self, place, offsets):
        """Pointers to places at these offsets, from one scalar: no vector of addresses has to be taken apart."""
        return [self.pointer(1, self._scalar_address(place, offset)) for offset in offsets]

    def running(self):
        """The running lanes as <32 x i1>."""
        return "splat (i1 true)" if self.mask is None else self.mask_lanes(self.mask)

    def _access(self, instr):
        """(element PTX type, number of elements per lane, place, registers)"""
        for mod in instr.mods[:-1]:
            if mod not in _LOAD_MODS:
                raise instr.unsupported(f"modifier `.{mod}`")
        place = next(o for o in instr.operands if isinstance(o, Mem))
        other = next(o for o in instr.operands if not isinstance(o, Mem))
        items = other.items if isinstance(other, Pack) else (other,)
        n = 4 if "v4" in instr.mods else 2 if "v2" in instr.mods else 1
        if n != len(items):
            raise instr.unsupported("a vector of another length")
        return instr.mods[-1], n, place, items

    # ---- copies ----

    def find_fours(self):
        """Finds 4 registers that are loaded together by all lanes from neighbouring places, 16 bytes each, and then
        only stored so: a copy. They are kept as they lie in memory, so nothing has to be sorted by lane. A `mov` may
        have given them a first value."""
        loaded, stored, others = set(), set(), set()
        for instr in self.lanes.every:
            names = self._whole_names(instr)
            if names:
                (loaded if instr.name == "ld" else stored).add(names)
            elif instr.name != "mov":
                others.update(instr.written)
            others.update(r for r in instr.reads if r not in (names or ()))
        n_fours = Counter(r for four in loaded | stored for r in four)
        others |= self.lanes.divided | {r for r, n in n_fours.items() if n > 1}
        return {r: (four, i) for four in loaded & stored if not others.intersection(four) for i, r in enumerate(four)}

    def _whole_names(self, instr):
        """The 4 registers of an instruction that loads or stores 16 neighbouring bytes for each lane."""
        if instr.name not in ("ld", "st") or "v4" not in instr.mods or SIZES.get(instr.mods[-1]) != 4 or \
                {type(o) for o in instr.operands} != {Mem, Pack}:
            return None
        place, pack = sorted(instr.operands, key=lambda o: isinstance(o, Pack))
        names, pattern = tuple(getattr(item, "name", None) for item in pack.items), self._pattern(place)
        same = all(name in self.registers and not self.lanes.scalar(name)
                   and self.type_of(name) == llvm_type(instr.mods[-1]) for name in names)
        is_whole = len(set(names)) == 4 and pattern is not None and self._neighbours(pattern, 16)
        return names if same and is_whole else None

    # ---- loads ----

    def find_joined_loads(self, block):
        """Finds 4 loads from shared memory in a block, of a word each, that read neighbouring words by one register,
        and each of which would be a gather. Nothing between them writes memory or waits for what others have written,
        so the first one loads for all. Sets joined_loads: id of the first one -> all 4, in the order of their
        addresses; of the others -> ()."""
        self.joined_loads, groups = {}, {}
        for instr in block.instrs if self.mask is None else ():
            if not instr.written or instr.name == "atom" or "acquire" in instr.mods:
                groups = {}
            elif instr.name == "ld" and self._gathers_words(instr) and instr.operands[0].name not in block.live_in:
                place = instr.operands[1]
                group = groups.setdefault((place.base.name, instr.mods), {})
                group.setdefault(place.offset, instr)      # of two loads of one place the first one counts
                for first in range(place.offset - 12, place.offset + 4, 4):
                    row = [group.get(first + 4 * i) for i in range(4)]
                    if all(row):
                        self.joined_loads |= {id(each): () for each in row}
                        self.joined_loads[id(next(each for each in group.values() if each in row))] = row
                        groups[place.base.name, instr.mods] = {at: i for at, i in group.items() if i not in row}
                        break

    def _gathers_words(self, instr):
        """Whether an instruction would gather words of shared memory from known places, by a register and into one that
        nothing else writes."""
        if instr.mods[:-1] != ("shared",) or SIZES.get(instr.mods[-1]) != 4 or \
                [type(o) for o in instr.operands] != [Reg, Mem] or not isinstance(instr.operands[1].base, Reg):
            return False
        target, place = instr.operands
        pattern = self._pattern(place)
        return self.n_definitions[place.base.name] == self.n_definitions[target.name] == 1 and \
            pattern is not None and find_runs(pattern, 4, 1) is None

    def op_ld(self, instr):
        if self.joined_loads.get(id(instr)) == ():
            return
        self._load_all(instr)
        if "acquire" in instr.mods:
            self.do("fence acquire")

    def _load_all(self, instr):
        kind, n, place, registers = self._access(instr)
        t, signed = llvm_type(kind), kind[0] == "s"
        if "param" in instr.mods and not isinstance(place.base, Reg):
            return self._load_parameter(instr, kind, place, registers)
        joined = self.joined_loads.get(id(instr), (instr,))
        for each in joined:
            self.note_access(each, next(o for o in each.operands if isinstance(o, Mem)), SIZES[kind] * n)
        if len(joined) == 4:
            n, place, registers = 4, joined[0].operands[1], [each.operands[0] for each in joined]
        pattern = self._pattern(place)
        if pattern is not None and len(set(pattern)) == 1:
            for i, register in enumerate(registers):
                pointer = self.pointer(1, self._scalar_address(place, pattern[0] + i * SIZES[kind]))
                self.put(register, t, 1, self.let(f"load {t}, ptr {pointer}, align {SIZES[kind]}"), signed)
            return
        runs = pattern and find_runs(pattern, SIZES[kind], n)
        if pattern is not None and self._neighbours(pattern, SIZES[kind] * n):
            whole = self._load_neighbours(registers, t, SIZES[kind], n, place, pattern[0])
            if registers[0].name in self.fours:
                return self.store_four(self.fours[registers[0].name][0], whole)
            values = self.deinterleave(t, whole, n)
        elif runs and len(runs) == n == 1 and runs[0][1] < WARP and self.mask is None:
            (start, length, lanes), = runs
            few = Repeat(self._load_run(t, SIZES[kind], length, place, start), t, length, tuple(lanes))
            return self.put_repeat(registers[0], few, signed)
        elif self._are_places(pattern, SIZES[kind], n, runs):
            for register, few in zip(registers, self._load_places(t, SIZES[kind], n, place, pattern)):
                self.put_repeat(register, few, signed)
            return
        elif runs:
            values = self._unless_masked([ty(t, WARP)] * n,
                                         lambda: self._load_runs(t, SIZES[kind], n, place, runs),
                                         lambda: self._load_lanes(t, SIZES[kind], n, place))
        else:
            values = self._load_lanes(t, SIZES[kind], n, place)
        for register, value in zip(registers, values):
            self.put(register, t, WARP, value, signed)

    def _unless_masked(self, types, whole, masked):
        """The results of whole() if all lanes run, else those of masked(). Code for both is written where only the
        run can tell."""
        if self.mask is None:
            return whole()
        self.n += 1
        tag = f"all{self.n}"
        everyone = self.compare("eq", "i32", 1, self.mask, "-1")
        self.do(f"br i1 {everyone}, label %{tag}.yes, label %{tag}.no")
        results = []
        for way, emit in (("yes", whole), ("no", masked)):
            self.label(f"{tag}.{way}")
            results.append(emit())
            self.do(f"br label %{tag}.{way}.end")
            self.label(f"{tag}.{way}.end")
            self.do(f"br label %{tag}.join")
        self.label(f"{tag}.join")
        return [self.let(f"phi {t} [{a}, %{tag}.yes.end], [{b}, %{tag}.no.end]")
                for t, a, b in zip(types, *results)] if types else None

    def _load_run(self, t, size, length, place, start):
        pointer = self.pointer(1, self._scalar_address(place, start))
        self._fetch_ahead(place, pointer, length * size)
        return self.let(f"load <{length} x {t}>, ptr {pointer}, align {size}")

    def _load_runs(self, t, size, n, place, runs):
        """Loads each run once; then every lane picks its elements."""
        values = [None] * n
        for start, length, firsts in runs:
            run = self._load_run(t, size, length, place, start)
            for i in range(n):
                picked = self.shuffle(t, length, run, [None if f is None else f + i for f in firsts])
                if values[i] is not None:           # lanes of this run replace those of the earlier ones
                    choice = [lane if f is None else WARP + lane for lane, f in enumerate(firsts)]
                    picked = self.shuffle(t, WARP, values[i], choice, picked)
                values[i] = picked
        return values

    def _are_places(self, pattern, size, n, runs):
        """Whether all lanes load 2 or 4 neighbours, from places that are known and have holes between them."""
        return pattern is not None and self.mask is None and n > 1 and size * n <= 16 and \
            (runs is None or all(length == n for _, length, _ in runs))

    def _load_places(self, t, size, n, place, pattern):
        """Loads n neighbours from each place once, however many lanes read it: n Repeats."""
        places, lanes = sorted(set(pattern)), None
        if len(places) > WARP // 2:
            places, lanes = pattern, tuple(range(WARP))
        parts = [self.let(f"load <{n} x {t}>, ptr {pointer}, align {size}") for pointer in self._places(place, places)]
        length = 1 << (len(parts) - 1).bit_length()
        parts += parts[-1:] * (length - len(parts))
        lanes = lanes or tuple(places.index(offset) for offset in pattern)
        return [Repeat(value, t, length, lanes) for value in self._transposed(t, n, parts)]

    def _transposed(self, t, n, parts):
        """n vectors: element 0 of all parts, which are vectors of n elements, element 1 of all parts, and so on."""
        if n != 4 or len(parts) != WARP:
            return self.deinterleave(t, self.concatenate(t, n, parts), n, len(parts))
        halves = [self._sixteen_transposed(t, parts[i:i + 16]) for i in (0, 16)]
        return [self.concatenate(t, 16, half) for half in zip(*halves)]

    def _sixteen_transposed(self, t, parts):
        """Of 16 parts of 4 elements. The shuffles stay within the quarters of a CPU's registers, so each is one
        instruction and needs no constant."""
        a, b, c, d = (self.concatenate(t, 4, parts[i::4]) for i in range(4))
        quarters = lambda *four: [4 * quarter + i for quarter in range(4) for i in four]
        pairs = [[self.shuffle(t, 16, x, quarters(i, 16 + i, i + 1, 17 + i), y) for x, y in ((a, b), (c, d))]
                 for i in (0, 2)]
        return [self.shuffle(t, 16, x, quarters(i, i + 1, 16 + i, 17 + i), y) for x, y in pairs for i in (0, 2)]

    def _load_lanes(self, t, size, n, place):
        """Loads lane by lane: a gather of single elements, or one load of n neighbours for each lane."""
        if n == 1 or size * n > 16:
            return [self.gather(t, size, self._lane_pointers(place, i * size)) for i in range(n)]
        pointers = self._safe_pointers(place)
        parts = [self.let(f"load <{n} x {t}>, ptr {self._lane(pointers, lane)}, align {size}")
                 for lane in range(WARP)]
        return self._transposed(t, n, parts)

    def _safe_pointers(self, place):
        """Pointers for all lanes. Those of lanes that do not run lead to a place that nobody needs."""
        pointers = self._lane_pointers(place)
        if self.mask is None:
            return pointers
        return self.select("ptr", WARP, self.running(), pointers, self.splat("ptr", "%nowhere"))

    def _lane(self, pointers, lane):
        return self.let(f"extractelement <{WARP} x ptr> {pointers}, i64 {lane}")

    def _load_parameter(self, instr, kind, place, registers):
        t = llvm_type(kind)
        for i, register in enumerate(registers):
            at = self.parameters.get(place.base.name)
            if at is None:
                raise instr.unsupported("an unknown parameter")
            pointer = self.let(f"getelementptr i8, ptr %params, i64 {at + place.offset + i * SIZES[kind]}")
            self.put(register, t, 1,
                     self.let(f"load {t}, ptr {pointer}, align {SIZES[kind]}, !invariant.load !0"),
                     kind[0] == "s")

    def _neighbours(self, pattern, size):
        return all(p - pattern[0] == size * lane for lane, p in enumerate(pattern))

    def _load_neighbours(self, registers, t, size, n, place, first):
        """Loads 32 * n elements in a row, n for each lane. `first`: the offset of lane 0's elements."""
        pointer, whole = self.pointer(1, self._scalar_address(place, first)), f"<{WARP * n} x {t}>"
        self._fetch_ahead(place, pointer, WARP * n * size)
        if self.mask is None:
            loaded = self.let(f"load {whole}, ptr {pointer}, align {size}")
            if n == 4 and t == "i32":
                self.note_quad(registers, loaded)
        else:
            loaded = self.call(f"llvm.masked.load.{suffix(t, WARP * n)}.p0", whole, ("ptr", pointer),
                               ("i32", str(size)),
                               (f"<{WARP * n} x i1>", self._wide_mask(n)), (whole, "zeroinitializer"))
        return loaded

    def _fetch_ahead(self, place, pointer, nbytes):
        """Prefetches what follows in memory, where a warp reads in a loop what no other block reads. The CPU does not
        do it well by itself: it loses track of a row that several loads share, and stops at the end of a page. Its L1
        cache waits for few lines at a time, so the long part of the way is the one into the L2 cache."""
        if not self.in_loop or "shared" in self.instr.mods or place.base.name not in self.block_dependent:
            return
        _, near, far = next(distances for distances in _AHEAD if nbytes >= distances[0])
        for ahead, locality in ((far, 1), (near, 3)):
            for offset in range(0, nbytes, 64):
                line = self.let(f"getelementptr i8, ptr {pointer}, i64 {ahead + offset}")
                self.call("llvm.prefetch.p0", "void", ("ptr", line), ("i32", "0"), ("i32", str(locality)), ("i32", "1"))

    def _wide_mask(self, n):
        lanes = self.running()
        return lanes if n == 1 else self.shuffle("i1", WARP, lanes, [i // n for i in range(WARP * n)])

    def deinterleave(self, t, whole, n, length=WARP):
        """The vectors of every n-th element, each of this length. For n = 4 it takes two steps, which need fewer
        instructions than one."""
        if n == 1:
            return [whole]
        even, odd = (self.shuffle(t, length * n, whole, range(i, length * n, 2)) for i in (0, 1))
        if n == 2:
            return [even, odd]
        half = length * n // 2
        return [self.shuffle(t, half, part, range(i, half, 2)) for i in (0, 1) for part in (even, odd)]

    def interleave(self, t, values):
        """The elements of 1, 2 or 4 vectors of 32, lane by lane."""
        n = len(values)
        whole = self.concatenate(t, WARP, values)
        return self.shuffle(t, WARP * n, whole, [c * WARP + lane for lane in range(WARP) for c in range(n)]) \
            if n > 1 else whole

    def gather(self, t, size, pointers):
        """One element for each running lane. The other lanes read a dummy."""
        if self.cpu_gathers and size >= 4:
            whole = ty(t, WARP)
            return self.call(f"llvm.masked.gather.{suffix(t, WARP)}.{suffix('ptr', WARP)}", whole,
                             (ty("ptr", WARP), pointers),
                             ("i32", str(size)), (ty("i1", WARP), self.running()), (whole, "zeroinitializer"))
        if self.mask is not None:
            pointers = self.select("ptr", WARP, self.running(), pointers, self.splat("ptr", "%nowhere"))
        value = "poison"
        for lane in range(WARP):
            element = self.let(f"load {t}, ptr {self._lane(pointers, lane)}, align {size}")
            value = self.let(f"insertelement <{WARP} x {t}> {value}, {t} {element}, i64 {lane}")
        return value

    # ---- stores ----

    def op_st(self, instr):
        kind, n, place, items = self._access(instr)
        t, size = llvm_type(kind), SIZES[kind]
        self.note_access(instr, place, size * n)
        if "release" in instr.mods:
            self.do("fence release")
        pattern = self._pattern(place)
        if pattern is not None and len(set(pattern)) == 1:
            for i, item in enumerate(items):
                pointer = self.pointer(1, self._scalar_address(place, pattern[0] + i * size))
                self.do(f"store {t} {self._last_lane(item, t)}, ptr {pointer}, align {size}")
            return
        if pattern is not None and self._neighbours(pattern, size * n):
            four = self.fours.get(getattr(items[0], "name", None))
            whole = self.load_four(four[0]) if four else self.interleave(t, [self.vector(item, t) for item in items])
            pointer = self.pointer(1, self._scalar_address(place, pattern[0]))
            if self.mask is None:
                self.do(f"store <{WARP * n} x {t}> {whole}, ptr {pointer}, align {size}")
            else:
                self.call(f"llvm.masked.store.{suffix(t, WARP * n)}.p0", "void",
                          (f"<{WARP * n} x {t}>", whole),
                          ("ptr", pointer), ("i32", str(size)), (f"<{WARP * n} x i1>", self._wide_mask(n)))
            return
        values = [self.vector(item, t) for item in items]
        runs = pattern and find_runs(pattern, size, n, once=True)
        if runs:
            self._unless_masked([], lambda: self._store_runs(t, size, n, place, runs, values),
                                lambda: self._store_lanes(t, size, n, place, values))
        else:
            self._store_lanes(t, size, n, place, values)

    def _store_runs(self, t, size, n, place, runs, values):
        whole = self.concatenate(t, WARP, values)
        for start, length, firsts in runs:
            sources = {f + i: i * WARP + lane for lane, f in enumerate(firsts) if f is not None
                       for i in range(n)}
            run = self.shuffle(t, WARP * n, whole, [sources[i] for i in range(length)])
            pointer = self.pointer(1, self._scalar_address(place, start))
            self.do(f"store <{length} x {t}> {run}, ptr {pointer}, align {size}")

    def _store_lanes(self, t, size, n, place, values):
        """Stores lane by lane, in order: a scatter of single elements, or one store of n neighbours for each lane."""
        if n == 1 or size * n > 16:
            for i, value in enumerate(values):
                self.scatter(t, size, self._lane_pointers(place, i * size), value)
            return
        pattern, whole = self._pattern(place), self.interleave(t, values)
        if pattern is not None and self.mask is None:
            pointers = self._places(place, pattern)
        else:
            every = self._safe_pointers(place)
            pointers = (self._lane(every, lane) for lane in range(WARP))
        for lane, pointer in enumerate(pointers):
            part = self.shuffle(t, WARP * n, whole, range(lane * n, lane * n + n))
            self.do(f"store <{n} x {t}> {part}, ptr {pointer}, align {size}")

    def _last_lane(self, item, t):
        """What a place holds after all running lanes have stored to it: the value of the highest lane."""
        if self.uniform(item):
            return self.scalar(item, t)
        lane = "31"
        if self.mask is not None:
            zeros = self.call("llvm.ctlz.i32", "i32", ("i32", self.mask), ("i1", "false"))
            lane = self.op("sub", "i32", 1, "31", zeros)
        return self.let(f"extractelement <{WARP} x {t}> {self.vector(item, t)}, i32 {lane}")

    def scatter(self, t, size, pointers, value):
        """One element per running lane, in order of lanes."""
        if self.cpu_gathers and size >= 4:
            self.call(f"llvm.masked.scatter.{suffix(t, WARP)}.{suffix('ptr', WARP)}", "void",
                      (ty(t, WARP), value),
                      (ty("ptr", WARP), pointers), ("i32", str(size)), (ty("i1", WARP), self.running()))
            return
        if self.mask is not None:
            pointers = self.select("ptr", WARP, self.running(), pointers, self.splat("ptr", "%nowhere"))
        for lane in range(WARP):
            element = self.let(f"extractelement <{WARP} x {t}> {value}, i64 {lane}")
            self.do(f"store {t} {element}, ptr {self._lane(pointers, lane)}, align {size}")

    # ---- atomics: lane by lane ----

    def op_atom(self, instr):
        operation, kind = instr.mods[-2:]
        for mod in instr.mods[:-2]:
            if mod not in _ATOM_MODS:
                if mod in ("add",) and operation == "noftz":
                    operation = "add"
                    continue
                raise instr.unsupported(f"modifier `.{mod}`")
        result = instr.operands[0] if instr.name == "atom" else None
        place, *sources = [o for o in instr.operands if o is not result]
        t = llvm_type(kind)
        self.note_access(instr, place, SIZES[kind])
        pointers = self._lane_pointers(place)
        values = [self.vector(s, t) for s in sources]
        old = self.each_lane(t, lambda lane: self._atomic(instr, operation, kind, t,
                             self.let(f"extractelement <{WARP} x ptr> {pointers}, i32 {lane}"),
                             [self.let(f"extractelement <{WARP} x {t}> {v}, i32 {lane}") for v in values]))
        if result is not None:
            self.put(result, t, WARP, old)

    op_red = op_atom

    def _atomic(self, instr, operation, kind, t, pointer, values):
        align = SIZES[kind]
        if operation == "cas":
            if kind[0] == "f":
                raise instr.unsupported()
            pair = self.let(f"cmpxchg ptr {pointer}, {t} {values[0]}, {t} {values[1]} seq_cst seq_cst, "
                            f"align {align}")
            return self.let(f"extractvalue {{{t}, i1}} {pair}, 0")
        if operation not in _ATOMIC or kind[0] == "f" and operation not in ("add", "exch"):
            raise instr.unsupported()
        name = _ATOMIC[operation]
        if kind[0] == "s" and operation in ("min", "max"):
            name = operation
        if kind == "f16" and operation == "add":
            return self._atomic_half(pointer, values[0])
        if kind[0] == "f" and operation == "add":
            name = "fadd"
        return self.let(f"atomicrmw {name} ptr {pointer}, {t} {values[0]} seq_cst, align {align}")

    def _atomic_half(self, pointer, value):
        value = self.let(f"bitcast i16 {value} to half")
        old = self.let(f"atomicrmw fadd ptr {pointer}, half {value} seq_cst, align 2")
        return self.let(f"bitcast half {old} to i16")

    def each_lane(self, t, body):
        """A loop over the running lanes: body(lane) computes the lane's element of the result."""
        self.n += 1
        tag = f"lanes{self.n}"
        mask = self.mask or "-1"
        self.do(f"br label %{tag}.enter")
        self.label(f"{tag}.enter")
        self.do(f"br label %{tag}.head")
        self.label(f"{tag}.head")
        self.do(f"%{tag}.left = phi i32 [{mask}, %{tag}.enter], [%{tag}.next, %{tag}.body.end]")
        self.do(f"%{tag}.value = phi <{WARP} x {t}> [zeroinitializer, %{tag}.enter], "
                f"[%{tag}.new, %{tag}.body.end]")
        self.do(f"%{tag}.any = icmp ne i32 %{tag}.left, 0")
        self.do(f"br i1 %{tag}.any, label %{tag}.body, label %{tag}.done")
        self.label(f"{tag}.body")
        lane = self.call("llvm.cttz.i32", "i32", ("i32", f"%{tag}.left"), ("i1", "true"))
        element = body(lane)
        self.do(f"%{tag}.new = insertelement <{WARP} x {t}> %{tag}.value, {t} {element}, i32 {lane}")
        less = self.op("sub", "i32", 1, f"%{tag}.left", "1")
        self.do(f"%{tag}.next = and i32 %{tag}.left, {less}")
        self.do(f"br label %{tag}.body.end")
        self.label(f"{tag}.body.end")
        self.do(f"br label %{tag}.head")
        self.label(f"{tag}.done")
        return f"%{tag}.value"

    # ---- lanes: shuffles and votes ----

    def op_shfl(self, instr):
        if "sync" not in instr.mods or instr.mods[-1] != "b32":
            raise instr.unsupported()
        how = instr.mods[1]
        target = instr.operands[0]
        pair = isinstance(target, Pair)
        value_register, inside_register = (target.first, target.second) if pair else (target, None)
        value, by, clamp = instr.operands[1:4]
        by_shape, clamp_shape = self.lanes.of(by, 32), self.lanes.of(clamp, 32)
        known = all(shape.const is not None and shape.uniform for shape in (by_shape, clamp_shape))
        if self.uniform(value) and inside_register is None:
            return self.put(value_register, "i32", 1, self.scalar(value, "i32"))
        if known:
            lanes, inside = zip(*(_source_lane(how, lane, by_shape.const, clamp_shape.const)
                                  for lane in range(WARP)))
            if self.uniform(value):
                moved, w = self.scalar(value, "i32"), 1
            elif len(set(lanes)) == 1:
                moved = self.let(f"extractelement <{WARP} x i32> {self.vector(value, 'i32')}, i32 {lanes[0]}")
                w = 1
            else:
                moved, w = self.shuffle("i32", WARP, self.vector(value, "i32"), lanes), WARP
            bits = vector_const("i1", ["true" if i else "false" for i in inside])
            if inside_register is not None:
                self._put_flags(inside_register, all(inside), bits)
        elif how == "idx" and self.uniform(by) and clamp_shape.const == 31:
            lane = self.op("and", "i32", 1, self.scalar(by, "i32"), "31")
            moved, w = self.let(f"extractelement <{WARP} x i32> {self.vector(value, 'i32')}, i32 {lane}"), 1
            if inside_register is not None:
                self._put_flags(inside_register, True, None)
        else:
            lanes, inside = self._source_lanes(how, self.vector(by, "i32"), self.vector(clamp, "i32"))
            moved, w = self.permute("i32", self.vector(value, "i32"), lanes), WARP
            if inside_register is not None:
                self.put(inside_register, "i1", WARP, inside)
        if w == 1 and not self.lanes.scalar(value_register.name):
            moved, w = self.splat("i32", moved), WARP
        self.put(value_register, "i32", w, moved)

    def _put_flags(self, register, always, bits):
        if register.name == "_":
            return
        if self.lanes.scalar(register.name):
            self.put(register, "i1", 1, "true")
        else:
            self.put(register, "i1", WARP, "splat (i1 true)" if always else bits)

    def _source_lanes(self, how, by, clamp):
        """(lane to read from, whether it lies within the segment) for each lane, as vectors."""
        w, t = WARP, "i32"
        lane = vector_const(t, range(WARP))
        segment = self.op("and", t, w, self.op("lshr", t, w, clamp, const(t, w, 8)), const(t, w, 31))
        limit = self.op("and", t, w, clamp, const(t, w, 31))
        by = self.op("and", t, w, by, const(t, w, 31))
        low = self.op("and", t, w, lane, segment)
        rest = self.op("xor", t, w, segment, const(t, w, 31))
        high = self.op("or", t, w, low, self.op("and", t, w, limit, rest))
        if how == "up":
            source = self.op("sub", t, w, lane, by)
            inside = self.compare("sge", t, w, source, high)
        else:
            source = {"down": lambda: self.op("add", t, w, lane, by),
                      "bfly": lambda: self.op("xor", t, w, lane, by),
                      "idx": lambda: self.op("or", t, w, low, self.op("and", t, w, by, rest))}[how]()
            inside = self.compare("sle", t, w, source, high)
        return self.select(t, w, inside, source, lane), inside

    def permute(self, t, value, lanes):
        """The vector value[lanes[i]] over the lanes i; all of `lanes` are below 32."""
        if self.cpu_permutes:
            low, high = (self.shuffle(t, WARP, value, part) for part in (range(16), range(16, 32)))
            halves = [self.call("llvm.x86.avx512.vpermi2var.d.512", "<16 x i32>", ("<16 x i32>", low),
                                ("<16 x i32>", self.shuffle("i32", WARP, lanes, part)), ("<16 x i32>", high))
                      for part in (range(16), range(16, 32))]
            return self.shuffle(t, 16, halves[0], range(32), halves[1])
        self.do(f"store <{WARP} x {t}> {value}, ptr %board")
        pointers = self.let(f"getelementptr {t}, ptr %board, <{WARP} x i32> {lanes}")
        mask, self.mask = self.mask, None
        result = self.gather(t, 4, pointers)
        self.mask = mask
        return result

    def _ballot(self, operand):
        """The running lanes whose predicate holds, as bits."""
        mask = self.mask or "-1"
        if self.uniform(operand):
            return self.select("i32", 1, self.scalar(operand, "i1"), mask, "0")
        bits = self.mask_bits(self.vector(operand, "i1"))
        return self.op("and", "i32", 1, bits, mask)

    def op_vote(self, instr):
        """A vote among the running lanes of a member mask. Lanes may name different masks."""
        how, (target, condition, mask) = instr.mods[1], instr.operands
        if "sync" not in instr.mods or how not in ("ballot", "any", "all", "uni"):
            raise instr.unsupported()
        w = 1 if self.uniform(mask) else WARP
        members = self._members(mask, w)
        bits = self._ballot(condition)
        bits = self.op("and", "i32", w, bits if w == 1 else self.splat("i32", bits), members)
        if how == "ballot":
            return self.put(target, "i32", w, bits)
        none = self.compare("eq", "i32", w, bits, const("i32", w, 0))
        every = self.compare("eq", "i32", w, bits, members)
        results = {"any": lambda: self.op("xor", "i1", w, none, const("i1", w, "true")), "all": lambda: every,
                   "uni": lambda: self.op("or", "i1", w, none, every)}
        self.put(target, "i1", w, results[how]())

    def _members(self, mask, w):
        """The running lanes of a member mask."""
        running = self.mask or "-1"
        return self.op("and", "i32", w, self.get(mask, "i32", w),
                       running if w == 1 else self.splat("i32", running))

    def op_match(self, instr):
        """`any`: for each lane, the members that have the same bits as this lane. `all`: all members if their bits
        are the same, else 0."""
        how, kind = instr.mods[0], instr.mods[-1]
        if "sync" not in instr.mods or how not in ("any", "all"):
            raise instr.unsupported()
        target, value, mask = instr.operands
        w = 1 if self.uniform(value, mask) else WARP
        members = self._members(mask, w)
        same = members if w == 1 else self.op("and", "i32", w, self._twins(llvm_type(kind), value), members)
        if how == "any":
            return self.put(target, "i32", w, same)
        target, flag = (target.first, target.second) if isinstance(target, Pair) else (target, Reg("_"))
        agree = self.compare("eq", "i32", w, same, members)
        self.put(flag, "i1", w, agree)
        self.put(target, "i32", w, self.select("i32", w, agree, members, const("i32", w, 0)))

    def _twins(self, t, value):
        """For each lane the bits of the lanes with the same value."""
        values, result = self.vector(value, t), "zeroinitializer"
        for lane in range(WARP):
            one = self.let(f"extractelement <{WARP} x {t}> {values}, i64 {lane}")
            same = self.mask_bits(self.compare("eq", t, WARP, values, self.splat(t, one)))
            result = self.let(f"insertelement <{WARP} x i32> {result}, i32 {same}, i64 {lane}")
        return result

    def op_activemask(self, instr):
        self.put(instr.operands[0], "i32", 1, self.mask or "-1")

    # ---- ordering ----

    def op_bar(self, instr):                        # bar.warp.sync; the others end a block
        pass

    def op_membar(self, instr):
        self.do("fence seq_cst")

    op_fence = op_membar

    def op_nanosleep(self, instr):
        """Gives the processor to others, among them whoever is to write what the warp waits for."""
        nanoseconds = self._last_lane(instr.operands[0], "i32")
        self.call("usleep", "i32", ("i32", self.op("udiv", "i32", 1, nanoseconds, "1000")))

    def op_prefetch(self, instr):
        pass

    def op_cp(self, instr):                         # waits for copies, which are made at once (ptx.py)
        pass


_MOST_RUNS = 4


def find_runs(pattern, size, n, once=False):
    """Stretches of memory without holes that the lanes' accesses, of n elements of `size` bytes each, fill:
    [(offset, number of elements, each lane's first element in the stretch or None)]. None if there are many
    stretches. once: no two lanes overlap."""
    low = min(pattern)
    if any((p - low) % size for p in pattern):
        return None
    firsts = [(p - low) // size for p in pattern]
    touched = sorted({f + i for f in firsts for i in range(n)})
    if once and len(touched) != WARP * n:
        return None
    starts = [e for e, before in zip(touched, [None] + touched) if before is None or e != before + 1]
    if len(starts) > _MOST_RUNS:
        return None
    runs = []
    for start, following in zip(starts, starts[1:] + [touched[-1] + 2]):
        length = max(e for e in touched if e < following) - start + 1
        inside = [f - start if start <= f < start + length else None for f in firsts]
        runs.append((low + start * size, length, inside))
    return runs


def _source_lane(how, lane, by, clamp):
    """(lane that shfl reads from, whether that lane is within the segment) for one lane, from constants."""
    by, segment, limit = by & 31, clamp >> 8 & 31, clamp & 31
    low = lane & segment
    high = low | limit & ~segment
    if how == "up":
        source = lane - by
        inside = source >= high
    else:
        source = {"down": lane + by, "bfly": lane ^ by, "idx": low | by & ~segment & 31}[how]
        inside = source <= high
    return (source if inside else lane), inside
