"""Instructions that Numba does not offer by name, and float functions that give the same bits on every card.

This file has two kinds of functions, for use inside `@cuda.jit` code.

*Instructions* are one line of inline PTX each (`dp4a`, `hfma2`, `prmt`, `div_rn`, ...) or one LLVM operation that
becomes one instruction (16-byte loads, bit casts).

*Float functions* (`exp`, `exp2`, `log`, `sigmoid`, `softplus`, `sincos`, ...) are device functions made only of IEEE
additions, multiplications, `fma` and correctly rounded divisions. The approximate instructions of a card
(`ex2.approx`, `rsqrt.approx`, ...) differ between generations. The functions here do not use them, so a V100, an H100
and the emulated card compute the same bits. Errors stated below are against float64, in units of the last place (ulp).

A *word* is a uint32. An int8x4 word holds bytes 0 to 3 from the lowest bits up. A half2 word holds element 0 in its low
16 bits and element 1 in its high 16 bits. In both this is the order of the elements in memory.
"""

from llvmlite import ir
from numba import cuda
from numba.core.errors import TypingError
from numba.core.types import UniTuple
from numba.cuda import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic
from numba.types import float32, int32, uint16, uint32, uint64

_IR = {float32: ir.FloatType(), int32: ir.IntType(32), uint32: ir.IntType(32), uint16: ir.IntType(16)}
_CONSTRAINT = {float32: "f", int32: "r", uint32: "r", uint16: "h"}


def _emit(text, result, arguments):
    """The code generator of one PTX instruction, for an intrinsic."""
    function = ir.FunctionType(_IR[result], [_IR[a] for a in arguments])
    constraints = ",".join(["=" + _CONSTRAINT[result]] + [_CONSTRAINT[a] for a in arguments])
    return lambda _, builder, __, values: builder.asm(function, text, constraints, values, False)


def _no_float(given, wanted):
    """Raises TypingError if a float is given where bits are wanted: Numba would make an integer of it unasked."""
    if isinstance(given, types.Float):
        raise TypingError(f"bits are wanted, a {wanted}, not a {given}")


def _typed(text, result, arguments, *given):
    """What an intrinsic for one PTX instruction returns. A float64 becomes the nearest float32."""
    for kind, wanted in zip(given, arguments):
        if wanted != float32:
            _no_float(kind, wanted)
    return result(*arguments), _emit(text, result, arguments)


def _instruction(text, result, *arguments, doc):
    """An intrinsic for one PTX instruction; in `text`, $0 is the result and $1, $2, ... are the operands."""

    # Numba reads the number of arguments from the Python signature, hence one function per number of arguments. `text`
    # is a free variable of each function, by which the key of the compilation cache tells two instructions apart.
    if len(arguments) == 1:
        def typing(context, a):
            return _typed(text, result, arguments, a)
    elif len(arguments) == 2:
        def typing(context, a, b):
            return _typed(text, result, arguments, a, b)
    else:
        def typing(context, a, b, c):
            return _typed(text, result, arguments, a, b, c)
    typing.__doc__ = doc
    typing.__name__ = text.split()[0]
    return intrinsic(typing)


# ---- integer dot products and bytes ------------------------------------------------------------------------

dp4a = _instruction("dp4a.s32.s32 $0, $1, $2, $3;", int32, uint32, uint32, int32,
                    doc="c + sum over 4 bytes of signed a_i * signed b_i; exact")
dp2a_lo = _instruction("dp2a.lo.s32.s32 $0, $1, $2, $3;", int32, uint32, uint32, int32,
                       doc="c + a.s16[0] * b.s8[0] + a.s16[1] * b.s8[1]; for cards whose dp4a is throttled")
dp2a_hi = _instruction("dp2a.hi.s32.s32 $0, $1, $2, $3;", int32, uint32, uint32, int32,
                       doc="c + a.s16[0] * b.s8[2] + a.s16[1] * b.s8[3]")
prmt = _instruction("prmt.b32 $0, $1, $2, $3;", uint32, uint32, uint32, uint32,
                    doc="byte i of the result: nibble i of the selector picks, 0..3 from a, 4..7 from b")



def _matrix_product(form, result, operand, n_a, n_b, n_c, doc):
    """The intrinsic of one `mma`: (a, b, c) -> c + a . b, each a tuple of the words or numbers that a lane holds. All
    lanes of a warp must take part."""
    places, ends = [f"${i}" for i in range(2 * n_c + n_a + n_b)], (n_c, n_c + n_a, n_c + n_a + n_b)
    packs = [", ".join(places[start:end]) for start, end in zip((0, *ends), (*ends, None))]
    text = f"mma.sync.aligned.{form} " + ", ".join(f"{{{pack}}}" for pack in packs) + ";"
    kinds = [result] * n_c + [operand] * (n_a + n_b) + [result] * n_c
    constraints = ",".join(("=" if i < n_c else "") + _CONSTRAINT[kind] for i, kind in enumerate(kinds))
    types = UniTuple(operand, n_a), UniTuple(operand, n_b), UniTuple(result, n_c)

    def typing(context, a, b, c):
        def codegen(context, builder, signature, values):
            held = [value for tuple in values for value in cgutils.unpack_tuple(builder, tuple)]
            words = ir.LiteralStructType([_IR[result]] * n_c)
            function = ir.FunctionType(words, [value.type for value in held])
            product = builder.asm(function, text, constraints, held, False)
            return context.make_tuple(builder, types[2], [builder.extract_value(product, i) for i in range(n_c)])
        return types[2](*types), codegen

    typing.__doc__ = doc
    return intrinsic(typing)


# Which elements of the matrices lane 4 g + t holds (PTX ISA, "Matrix Fragments"), here of int8 with int32 sums:
#
#     a   word i + 2 h or, of 8 rows, word h     row g + 8 i, bytes 16 h + 4 t .. 16 h + 4 t + 3
#     b   word h                                 column g, the same bytes
#     c   number 2 i + j                         row g + 8 i, column 2 t + j

mma_s8_16x8x32 = _matrix_product("m16n8k32.row.col.s32.s8.s8.s32", int32, uint32, 4, 2, 4,
                                 "int8 [16, 32] . [32, 8] + int32 [16, 8], exact modulo 2**32; from sm_80 on")
mma_s8_16x8x16 = _matrix_product("m16n8k16.row.col.s32.s8.s8.s32", int32, uint32, 2, 1, 4,
                                 "int8 [16, 16] . [16, 8] + int32 [16, 8], exact modulo 2**32; from sm_80 on")
mma_s8_8x8x16 = _matrix_product("m8n8k16.row.col.s32.s8.s8.s32", int32, uint32, 1, 1, 2,
                                "int8 [8, 16] . [16, 8] + int32 [8, 8], exact modulo 2**32; from sm_75 on")


@intrinsic
def load_matrices(context, address):
    """Four matrices of 8 rows of 16 bytes from shared memory: lane 8 i + j gives the address of row j of matrix i.
    Lane 4 g + t gets word t of row g of each: what `mma` takes of int8. All lanes must take part; from sm_75 on."""
    def codegen(context, builder, signature, values):
        words, pointer = ir.LiteralStructType([ir.IntType(32)] * 4), ir.IntType(32).as_pointer(_SHARED)
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        loaded = builder.asm(ir.FunctionType(words, [pointer]), text, "=r,=r,=r,=r,l,~{memory}",
                             [builder.inttoptr(values[0], pointer)], True)
        return context.make_tuple(builder, UniTuple(uint32, 4), [builder.extract_value(loaded, i) for i in range(4)])
    return UniTuple(uint32, 4)(uint64), codegen


# Of half precision, for Volta: lanes 4 q .. 4 q + 3 and 16 + 4 q .. 16 + 4 q + 3 make product q of four. Of them lane
# 16 u + 4 q + p holds
#
#     a   half2 words 0, 1        row 4 u + p, elements 0 .. 3
#     b   half2 words 0, 1        column 4 u + p, elements 0 .. 3
#     c   number 4 e + 2 d + j    row 4 u + p % 2 + 2 d, column 4 e + p / 2 * 2 + j

mma_f16_8x8x4 = _matrix_product("m8n8k4.row.col.f32.f16.f16.f32", float32, uint32, 2, 2, 8,
                                "4 x float16 [8, 4] . [4, 8] + float32 [8, 8]. Exact for integers whose magnitudes add "
                                "up to less than 2**24: in no other case does a card promise bits")

opaque = _instruction("mov.b32 $0, $1;", uint32, uint32,
                      doc="a, of which the compiler knows nothing: so it keeps no address that it could make anew")


@intrinsic
def opaque_address(context, address):
    """An address, of which the compiler knows nothing, as `opaque`."""
    def codegen(context, builder, signature, values):
        function = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.asm(function, "mov.b64 $0, $1;", "=l,l", values, False)
    return uint64(uint64), codegen


# ---- half precision, two at a time -------------------------------------------------------------------------

hfma2 = _instruction("fma.rn.f16x2 $0, $1, $2, $3;", uint32, uint32, uint32, uint32,
                     doc="half2 a * b + c, each half rounded once")
hadd2 = _instruction("add.rn.f16x2 $0, $1, $2;", uint32, uint32, uint32, doc="half2 a + b")
hmul2 = _instruction("mul.rn.f16x2 $0, $1, $2;", uint32, uint32, uint32, doc="half2 a * b")
half_bits = _instruction("cvt.rn.f16.f32 $0, $1;", uint16, float32, doc="float32 -> bits of nearest float16")
half_to_float = _instruction("cvt.f32.f16 $0, $1;", float32, uint16, doc="bits of float16 -> float32, exact")
pack_half2 = _instruction("{.reg .b16 l, h; cvt.rn.f16.f32 l, $1; cvt.rn.f16.f32 h, $2; mov.b32 $0, {l, h};}",
                          uint32, float32, float32, doc="two float32 -> half2 word (low, high), nearest")
half2_low = _instruction("{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l;}", float32, uint32,
                         doc="element 0 of a half2 word as float32, exact")
half2_high = _instruction("{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h;}", float32, uint32,
                          doc="element 1 of a half2 word as float32, exact")
both_low = _instruction("{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l};}", uint32, uint32,
                        doc="element 0 of a half2 word twice; it costs no instruction")
both_high = _instruction("{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h};}", uint32, uint32,
                         doc="element 1 of a half2 word twice")

# ---- correctly rounded float32 -----------------------------------------------------------------------------

div_rn = _instruction("div.rn.f32 $0, $1, $2;", float32, float32, float32, doc="a / b, correctly rounded")
sqrt_rn = _instruction("sqrt.rn.f32 $0, $1;", float32, float32, doc="square root, correctly rounded")
round_to_int = _instruction("cvt.rni.s32.f32 $0, $1;", int32, float32, doc="nearest integer, ties to even")
float_max = _instruction("max.f32 $0, $1, $2;", float32, float32, float32, doc="maximum; a NaN is ignored")
float_min = _instruction("min.f32 $0, $1, $2;", float32, float32, float32, doc="minimum; a NaN is ignored")


# ---- bit casts ---------------------------------------------------------------------------------------------

@intrinsic
def float_as_word(context, x):
    """The 32 bits of a float32 as a uint32."""
    return uint32(float32), lambda _, builder, __, values: builder.bitcast(values[0], ir.IntType(32))


@intrinsic
def word_as_float(context, x):
    """The float32 whose bits are this word (uint32 or int32)."""
    _no_float(x, "uint32 or int32")
    if x == int32:
        return float32(int32), lambda _, builder, __, values: builder.bitcast(values[0], ir.FloatType())
    return float32(uint32), lambda _, builder, __, values: builder.bitcast(values[0], ir.FloatType())


# ---- wide memory accesses ----------------------------------------------------------------------------------
# `index` counts elements of the type of the array from its first element; several dimensions count as one. The address
# must be a multiple of the access size; otherwise the checking mode and a real card both fault.

_GLOBAL, _SHARED = 1, 3                  # the numbers of these address spaces


def _word_pointer(context, builder, array_type, array, index, n_words):
    data = context.make_array(array_type)(context, builder, array).data
    word = ir.IntType(32) if n_words == 1 else ir.VectorType(ir.IntType(32), n_words)
    index = builder.zext(index, ir.IntType(64))  # a bare 32-bit index counts as signed: wrong from 2**31
    return builder.bitcast(builder.gep(data, [index]), word.as_pointer())


def _shared_pointer(builder, address, n_words):
    word = ir.IntType(32) if n_words == 1 else ir.VectorType(ir.IntType(32), n_words)
    return builder.inttoptr(address, word.as_pointer(_SHARED))


def _load(context, builder, pointer, n_words):
    loaded = builder.load(pointer, align=4 * n_words)
    if n_words == 1:
        return loaded
    words = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), i)) for i in range(n_words)]
    return context.make_tuple(builder, UniTuple(uint32, n_words), words)


def _store(context, builder, pointer, words):
    stored = words[0]
    if len(words) > 1:
        stored = ir.Constant(ir.VectorType(ir.IntType(32), len(words)), ir.Undefined)
        for i, word in enumerate(words):
            stored = builder.insert_element(stored, word, ir.Constant(ir.IntType(32), i))
    builder.store(stored, pointer, align=4 * len(words))
    return context.get_dummy_value()


def _load_words(array, index, n_words):
    def codegen(context, builder, signature, values):
        pointer = _word_pointer(context, builder, signature.args[0], values[0], values[1], n_words)
        return _load(context, builder, pointer, n_words)

    index = types.uint64 if index == types.uint64 else uint32
    return (uint32 if n_words == 1 else UniTuple(uint32, n_words))(array, index), codegen


def _store_words(array, index, n_words):
    def codegen(context, builder, signature, values):
        pointer = _word_pointer(context, builder, signature.args[0], values[0], values[1], n_words)
        return _store(context, builder, pointer, values[2:])

    index = types.uint64 if index == types.uint64 else uint32
    return types.void(array, index, *[uint32] * n_words), codegen


@intrinsic
def load_word(context, array, index):
    """4 bytes at `index` of an array of any element type -> uint32."""
    return _load_words(array, index, 1)


@intrinsic
def load_byte(context, array, byte):
    """The byte at this distance, in bytes, from the start of an array of any element type -> uint32."""
    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        start = builder.bitcast(data, ir.IntType(8).as_pointer())
        pointer = builder.gep(start, [builder.zext(values[1], ir.IntType(64))])
        return builder.zext(builder.load(pointer), ir.IntType(32))
    return uint32(array, uint32), codegen


@intrinsic
def load_words2(context, array, index):
    """8 bytes at `index` -> 2 words."""
    return _load_words(array, index, 2)


@intrinsic
def load_words4(context, array, index):
    """16 bytes at `index` -> 4 words: the widest load, one memory instruction."""
    return _load_words(array, index, 4)


@intrinsic
def array_at(context, address, like):
    """The memory from a global address (uint64) on, as a flat array of the type of `like`. It has no length: loads and
    stores by index work, and whoever uses it stays inside."""
    def codegen(context, builder, signature, values):
        made = context.make_array(signature.return_type)(context, builder)
        one, zero = ir.Constant(ir.IntType(64), 1), ir.Constant(ir.IntType(64), 0)
        itemsize = ir.Constant(ir.IntType(64), context.get_abi_sizeof(context.get_data_type(like.dtype)))
        made.data = builder.inttoptr(values[0], made.data.type)
        made.nitems, made.itemsize = zero, itemsize
        made.shape = cgutils.pack_array(builder, [one])
        made.strides = cgutils.pack_array(builder, [itemsize])
        return made._getvalue()
    return like(uint64, like), codegen


def _stream_words(n_words, how=None):
    """A load that leaves nothing in the first-level cache. For constant data that is read once, as weights are. how:
    the word of PTX for a load of data that changes; the compiler leaves it where it stands."""
    constant, how = how is None, how or "nc.L1::no_allocate"
    constraints = "=r," * n_words + ("l" if constant else "l,~{memory}")
    registers = ", ".join(f"${i}" for i in range(n_words))
    text = f"ld.global.{how}.v{n_words}.u32 {{{registers}}}, [${n_words}];" if n_words > 1 else \
        f"ld.global.{how}.u32 $0, [$1];"

    def typing(context, array, index):
        def codegen(context, builder, signature, values):
            pointer = _word_pointer(context, builder, signature.args[0], values[0], values[1], 1)
            pointer = builder.addrspacecast(pointer, ir.IntType(32).as_pointer(_GLOBAL))
            result = ir.LiteralStructType([ir.IntType(32)] * n_words) if n_words > 1 else ir.IntType(32)
            function = ir.FunctionType(result, [pointer.type])
            loaded = builder.asm(function, text, constraints, [pointer], not constant)
            if n_words == 1:
                return loaded
            words = [builder.extract_value(loaded, i) for i in range(n_words)]
            return context.make_tuple(builder, UniTuple(uint32, n_words), words)
        return (UniTuple(uint32, n_words) if n_words > 1 else uint32)(array, uint32), codegen
    typing.__doc__ = f"{4 * n_words} bytes of {'constant data, read once,' if constant else 'data'} at index -> words."
    return intrinsic(typing)


stream_word = _stream_words(1)
stream_words2 = _stream_words(2)
stream_words4 = _stream_words(4)
load_past_l1 = _stream_words(1, "cg")  # a word from the second-level cache, in which all launches meet
load_words4_past_l1 = _stream_words(4, "cg")
load_words4_anew = _stream_words(4, "cv")  # 16 bytes from memory that the host writes, past all caches


def table_words4(table):
    """An intrinsic (index) -> 4 words of a table from word `index` on. table: uint32 [n]; n and index multiples of 4.
    It is a constant of the compiled kernel in global memory: neighbouring lanes load neighbouring words at
    once, where memory that is declared constant would serve one address after the other."""
    def typing(context, index):
        def codegen(context, builder, signature, values):
            words = ir.ArrayType(ir.IntType(32), len(table))
            held = ir.GlobalVariable(builder.module, words, builder.module.get_unique_name("table"), _GLOBAL)
            held.linkage, held.global_constant, held.align = "internal", True, 16
            held.initializer = ir.Constant(words, table.tolist())
            at = builder.gep(held, [ir.Constant(ir.IntType(64), 0), builder.zext(values[0], ir.IntType(64))])
            pointer = builder.bitcast(at, ir.VectorType(ir.IntType(32), 4).as_pointer(_GLOBAL))
            return _load(context, builder, pointer, 4)
        return UniTuple(uint32, 4)(uint32), codegen
    return intrinsic(typing)


@intrinsic
def store_word(context, array, index, w0):
    """Writes 4 bytes at `index`."""
    return _store_words(array, index, 1)


@intrinsic
def store_words2(context, array, index, w0, w1):
    """Writes 8 bytes at `index`."""
    return _store_words(array, index, 2)


@intrinsic
def store_words4(context, array, index, w0, w1, w2, w3):
    """Writes 16 bytes at `index`."""
    return _store_words(array, index, 4)


@cuda.jit(device=True, forceinline=True)
def load_floats4(array, index):
    """16 bytes at `index` -> 4 float32."""
    w0, w1, w2, w3 = load_words4(array, index)
    return word_as_float(w0), word_as_float(w1), word_as_float(w2), word_as_float(w3)


@cuda.jit(device=True, forceinline=True)
def store_floats4(array, index, x0, x1, x2, x3):
    """Writes 4 float32 at `index`, 16 bytes."""
    store_words4(array, index, float_as_word(x0), float_as_word(x1), float_as_word(x2), float_as_word(x3))


@intrinsic
def arrive(context, array, index):
    """Adds 1 to the uint32 at `index`; returns the value before. For one thread of a block, between two barriers: what
    a block wrote before it arrived is visible to every block that arrives later. One instruction releases and
    acquires; `threadfence` would also wait for an order that is not needed."""
    def codegen(context, builder, signature, values):
        pointer = _word_pointer(context, builder, signature.args[0], values[0], values[1], 1)
        pointer = builder.ptrtoint(pointer, ir.IntType(64))
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        text = "atom.acq_rel.gpu.add.u32 $0, [$1], 1;"
        return builder.asm(function, text, "=r,l,~{memory}", [pointer], True)
    return uint32(array, uint32), codegen


# ---- flags between the card and the host --------------------------------------------------------------------
# In memory that both reach (`mapped` in kernels/card.py). Whoever sees a flag that `publish` has raised sees, too, what
# the thread had written before, and what other threads had written before a barrier with it. A host that polls the
# flag reads it first and the rest afterwards, and raises its own flag last.

def _global_word(context, builder, signature, values):
    pointer = _word_pointer(context, builder, signature.args[0], values[0], values[1], 1)
    return builder.addrspacecast(pointer, ir.IntType(32).as_pointer(_GLOBAL))


@intrinsic
def poll(context, array, index):
    """The uint32 at `index` as the host or the card last wrote it, with all that was written before it."""
    def codegen(context, builder, signature, values):
        pointer = _global_word(context, builder, signature, values)
        function = ir.FunctionType(ir.IntType(32), [pointer.type])
        return builder.asm(function, "ld.acquire.sys.global.u32 $0, [$1];", "=r,l,~{memory}", [pointer], True)
    return uint32(array, uint32), codegen


@intrinsic
def publish(context, array, index, word):
    """Writes the uint32 at `index` for host and card, after all that came before."""
    def codegen(context, builder, signature, values):
        pointer = _global_word(context, builder, signature, values)
        function = ir.FunctionType(ir.VoidType(), [pointer.type, ir.IntType(32)])
        builder.asm(function, "st.release.sys.global.u32 [$0], $1;", "l,r,~{memory}", [pointer, values[2]], True)
        return context.get_dummy_value()
    return types.void(array, uint32, uint32), codegen


@intrinsic
def nanoseconds(context):
    """The time of a clock of the card, in steps of about a microsecond -> uint64."""
    def codegen(context, builder, signature, values):
        function = ir.FunctionType(ir.IntType(64), [])
        return builder.asm(function, "mov.u64 $0, %globaltimer;", "=l,~{memory}", [], True)
    return uint64(), codegen


# ---- launches that overlap ---------------------------------------------------------------------------------
# From Hopper on, a kernel that calls `wait_for_previous` starts while the previous kernel of its stream is still
# running: as soon as all blocks of the previous kernel have called `let_next_begin` or ended, wherever an SM has room.
# What the kernel does before its wait then takes no time of its own. Several kernels before it may still be running,
# back to the last launch that does not overlap; that launch itself began when all kernels before it had ended. So
# before its wait a kernel may read only what no kernel has written since that launch began: constants, as weights are,
# and in a decode step the states, keys and positions that earlier steps left (`early`, below). A kernel that waits but
# never calls `let_next_begin` counts as such a launch, too, if it ends with a fence: all before it have ended, and none
# behind it begins before it has ended (kernels/advance.py). Code for older cards has neither call (kernels/compile.py).

def _order(text):
    def typing(context):
        def codegen(context, builder, signature, values):
            builder.asm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", [], True)
            return context.get_dummy_value()
        return types.void(), codegen

    return typing


let_next_begin = intrinsic(_order("griddepcontrol.launch_dependents;"))
wait_for_previous = intrinsic(_order("griddepcontrol.wait;"))  # waits until it has ended and its writes are visible


# `early` is an option of the kernels that carry a sequence on (kernels/gdn_decode.py, kernels/attend_decode.py). With
# it they read before the wait what earlier tokens of the slot left in states, rings and pages, and the slot's position.
# That is right where these have not been written since the last launch that does not overlap. Such a launch comes right
# before the layers:
#   on the card with the first layers          the embedding, which lets the next launch begin but does not overlap
#                                              itself. On one card this costs nothing: the recording of a step begins
#                                              with the embedding
#   on a card with the last layers only        a copy of hidden states; the recording that follows begins when all
#                                              before it has ended
# By then the step before, of any group of slots, its sampler and `advance` have ended, and so have prompts, resets,
# checkpoints and new slots. Later launches of the pass belong to other layers, with their own states and pages.
# `early` would be wrong, so it is not asked for, where
#   a pass takes several tokens of one slot    each reads what the launch just before it wrote
#   positions move on at the start of a step   and no embedding follows: on a card with neither the first nor the last
#                                              layers


@intrinsic
def prefetch(context, array, index):
    """Loads the 128 bytes around element `index` into the second-level cache. No result depends on it, so it may come
    before `wait_for_previous`. Code for cards before Hopper does not contain it."""
    def codegen(context, builder, signature, values):
        pointer = _word_pointer(context, builder, signature.args[0], values[0], values[1], 1)
        pointer = builder.addrspacecast(pointer, ir.IntType(32).as_pointer(_GLOBAL))
        function = ir.FunctionType(ir.VoidType(), [pointer.type])
        builder.asm(function, "prefetch.global.L2 [$0];", "l", [pointer], True)
        return context.get_dummy_value()
    return types.void(array, uint32), codegen


def part_barrier(kind, threads):
    """An intrinsic (number) for barrier `number` of a block, 1 to 15, of so many of its threads. kind: "sync" waits for
    them all; "arrive" is counted as one of them, with all that the thread has stored, and goes on."""
    text = f"bar.{kind} $0, {threads};"

    def typing(context, number):
        def codegen(context, builder, signature, values):
            function = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            builder.asm(function, text, "r,~{memory}", values, True)
            return context.get_dummy_value()
        return types.void(uint32), codegen

    return intrinsic(typing)


# ---- shared memory by address ------------------------------------------------------------------------------
# A loop that keeps an address and adds to it needs no instruction to compute addresses: a constant offset from an
# address is part of the load. An index costs a shift and an addition for each array that it is used in.

@intrinsic
def shared_address(context, array):
    """The address of a shared array -> uint64."""
    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        pointer = builder.addrspacecast(data, ir.IntType(8).as_pointer(_SHARED))
        return builder.ptrtoint(pointer, ir.IntType(64))
    return types.uint64(array), codegen


@intrinsic
def load_shared(context, address):
    """4 bytes at an address in shared memory -> uint32."""
    return uint32(types.uint64), lambda context, builder, signature, values: _load(
        context, builder, _shared_pointer(builder, values[0], 1), 1)


@intrinsic
def load_shared2(context, address):
    """8 bytes at an address in shared memory -> 2 words."""
    return UniTuple(uint32, 2)(types.uint64), lambda context, builder, signature, values: _load(
        context, builder, _shared_pointer(builder, values[0], 2), 2)


@intrinsic
def load_shared4(context, address):
    """16 bytes at an address in shared memory -> 4 words."""
    return UniTuple(uint32, 4)(types.uint64), lambda context, builder, signature, values: _load(
        context, builder, _shared_pointer(builder, values[0], 4), 4)


@intrinsic
def store_shared(context, address, w0):
    """Writes 4 bytes at an address in shared memory."""
    return types.void(types.uint64, uint32), lambda context, builder, signature, values: _store(
        context, builder, _shared_pointer(builder, values[0], 1), values[1:])


@intrinsic
def store_shared2(context, address, w0, w1):
    """Writes 8 bytes at an address in shared memory."""
    return types.void(types.uint64, uint32, uint32), lambda context, builder, signature, values: _store(
        context, builder, _shared_pointer(builder, values[0], 2), values[1:])


@intrinsic
def store_shared4(context, address, w0, w1, w2, w3):
    """Writes 16 bytes at an address in shared memory."""
    return types.void(types.uint64, *[uint32] * 4), lambda context, builder, signature, values: _store(
        context, builder, _shared_pointer(builder, values[0], 4), values[1:])


# Copies from global to shared memory that pass no register, from sm_80 on. A thread starts copies and commits them as a
# group. Once it has waited for a group it sees what the group has brought; other threads see it behind a barrier.

@intrinsic
def global_address(context, array):
    """The address of an array in global memory -> uint64."""
    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(builder.addrspacecast(data, ir.IntType(8).as_pointer(_GLOBAL)), ir.IntType(64))
    return uint64(array), codegen


def _copy(n_bytes, cache, doc):
    def typing(context, to, source):
        def codegen(context, builder, signature, values):
            function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
            text = f"cp.async.{cache}.shared.global [$0], [$1], {n_bytes};"
            builder.asm(function, text, "l,l,~{memory}", values, True)
            return context.get_dummy_value()
        return types.void(uint64, uint64), codegen
    typing.__doc__ = doc
    return intrinsic(typing)


start_copy = _copy(4, "ca", "Starts to copy 4 bytes to a shared address from a global one.")
start_copy4 = _copy(16, "cg", "Starts to copy 16 bytes to a shared address from a global one, past the L1 cache.")
commit_copies = intrinsic(_order("cp.async.commit_group;"))


def wait_for_copies(n):
    """An intrinsic () that waits until only the last `n` groups of the thread, or fewer, are under way."""
    return intrinsic(_order(f"cp.async.wait_group {n};"))


# ---- int32 -> float32 without a conversion instruction -----------------------------------------------------
# Converting int to float runs at a quarter of the rate on Volta. The float 1.5 * 2**23 = 12582912.0 has the bits
# 0x4B400000 and an ulp of 1. So an integer sum that starts at 0x4B400000 and stays within +-2**22 of it reads as the
# float 12582912.0 + sum. The sum over a Q8_0 block, 32 products of int8, is at most 32 * 128 * 128 = 2**19.

BIAS_WORD = 0x4B400000
BIAS_FLOAT = 12582912.0


@cuda.jit(device=True, forceinline=True)
def unbias(total):
    """The float32 value of an int32 sum that was started at BIAS_WORD; exact for |sum| <= 2**22."""
    return word_as_float(int32(total)) - float32(BIAS_FLOAT)


# ---- warps -------------------------------------------------------------------------------------------------

# The assembler knows that all lanes have the same number only if a shuffle gave it to them. Where a loop or a branch
# depends on any other number, it expects lanes to diverge. Then it writes a second path for each later shuffle, and
# moves loaded values from register to register, for which the warp waits.

@cuda.jit(device=True, forceinline=True)
def uniform(x):
    """x, a uint32 that all lanes of a warp have in common, so that the assembler knows it. All lanes must take part."""
    return uint32(cuda.shfl_sync(0xFFFFFFFF, int32(x), 0))


@cuda.jit(device=True, forceinline=True)
def warp_number():
    """threadIdx.y, in a kernel whose blocks of threads are 32 wide."""
    return uniform(cuda.threadIdx.y)


@cuda.jit(device=True, forceinline=True)
def word_sum(word, total):
    """`total` plus the four int8 of a word."""
    return dp4a(word, uint32(0x01010101), total)


# ---- reductions over a warp --------------------------------------------------------------------------------
# The butterfly adds the same pairs on every lane, and IEEE addition commutes, so all lanes end with the same bits.

@cuda.jit(device=True, forceinline=True)
def warp_sum(x):
    """Sum over the 32 lanes, the same bits on every lane. All lanes must take part."""
    x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 16)
    x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 8)
    x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 4)
    x = x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)
    return x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)


@cuda.jit(device=True, forceinline=True)
def warp_max(x):
    """Maximum over the 32 lanes of a float32."""
    x = float_max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 16))
    x = float_max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 8))
    x = float_max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 4))
    x = float_max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 2))
    return float_max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 1))


# ---- float functions ---------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def _clamp(x, low, high):
    """x limited to [low, high]. A NaN stays a NaN, unlike with `float_max` and `float_min`: errors stay visible."""
    x = low if x < low else x
    return high if x > high else x


@intrinsic
def _no_float64(context, x):
    """x, unless it is a float64: then the kernel is not compiled."""
    if x == types.float64:
        raise TypingError("a float32 is wanted, not a float64: is a float32(...) missing? 0.0 is a float64")
    return x(x), lambda _, builder, __, values: values[0]


@cuda.jit(device=True, forceinline=True)
def _nearest(x):
    """The nearest integer to x, ties to even, for |x| < 2**22, as int32 and float32: the addition rounds. That of
    float64 would keep a fraction."""
    biased = _no_float64(x) + float32(BIAS_FLOAT)
    return int32(float_as_word(biased) - uint32(BIAS_WORD)), biased - float32(BIAS_FLOAT)


@cuda.jit(device=True, forceinline=True)
def _scale_by_power_of_two(x, n):
    """x * 2**n for |n| <= 250, rounded once: two factors keep each power of two a normal number."""
    half = n >> int32(1)
    first = word_as_float(uint32(uint32(half + int32(127)) << uint32(23)))
    second = word_as_float(uint32(uint32(n - half + int32(127)) << uint32(23)))
    return x * first * second


@cuda.jit(device=True, forceinline=True)
def exp(x):
    """e**x within 1.1 ulp; 0 below -104, infinity above 89. Cody and Waite's reduction, then degree 7."""
    x = _clamp(x, float32(-104.0), float32(89.0))
    n, nf = _nearest(x * float32(1.4426950408889634))
    r = cuda.fma(nf, float32(-0.693145751953125), x)
    r = cuda.fma(nf, float32(-1.428606765330187e-06), r)
    p = cuda.fma(r, float32(1.0 / 5040), float32(1.0 / 720))
    p = cuda.fma(p, r, float32(1.0 / 120))
    p = cuda.fma(p, r, float32(1.0 / 24))
    p = cuda.fma(p, r, float32(1.0 / 6))
    p = cuda.fma(p, r, float32(0.5))
    p = cuda.fma(p * r, r, r)
    return _scale_by_power_of_two(p + float32(1.0), n)


@cuda.jit(device=True, forceinline=True)
def exp2(x):
    """2**x within 1 ulp; 0 below -150, infinity above 129."""
    x = _clamp(x, float32(-151.0), float32(129.0))
    n, nf = _nearest(x)
    f = x - nf
    r = f * float32(0.6931471805599453)
    r_low = cuda.fma(f, float32(0.6931471805599453), -r)
    r_low = cuda.fma(f, float32(-1.904654290582768e-09), r_low)
    p = cuda.fma(r, float32(1.0 / 5040), float32(1.0 / 720))
    p = cuda.fma(p, r, float32(1.0 / 120))
    p = cuda.fma(p, r, float32(1.0 / 24))
    p = cuda.fma(p, r, float32(1.0 / 6))
    p = cuda.fma(p, r, float32(0.5))
    p = cuda.fma(p * r, r, r_low) + r
    return _scale_by_power_of_two(p + float32(1.0), n)


@cuda.jit(device=True, forceinline=True)
def _two_atanh(s):
    """log((1 + s) / (1 - s)) for |s| <= 1/3, from the odd series 2 (s + s**3/3 + s**5/5 + ...)."""
    t = s * s
    p = cuda.fma(t, float32(2.0 / 15), float32(2.0 / 13))
    p = cuda.fma(p, t, float32(2.0 / 11))
    p = cuda.fma(p, t, float32(2.0 / 9))
    p = cuda.fma(p, t, float32(2.0 / 7))
    p = cuda.fma(p, t, float32(2.0 / 5))
    p = cuda.fma(p, t, float32(2.0 / 3))
    return cuda.fma(p * t, s, s + s)


@cuda.jit(device=True, forceinline=True)
def log(x):
    """Natural logarithm of a positive normal float32, within 3 ulp."""
    word = float_as_word(x)
    n = int32(word - uint32(0x3F3504F3)) >> int32(23)  # exponent for a mantissa in [sqrt(1/2), sqrt(2))
    m = word_as_float(uint32(word - uint32(uint32(n) << uint32(23))))
    nf = word_as_float(int32(n + int32(BIAS_WORD))) - float32(BIAS_FLOAT)
    y = _two_atanh(div_rn(m - float32(1.0), m + float32(1.0)))
    return cuda.fma(nf, float32(0.693145751953125), cuda.fma(nf, float32(1.428606765330187e-06), y))


@cuda.jit(device=True, forceinline=True)
def sigmoid(x):
    """1 / (1 + e**-x), within 2.5 ulp."""
    return div_rn(float32(1.0), float32(1.0) + exp(-x))


@cuda.jit(device=True, forceinline=True)
def silu(x):
    """x * sigmoid(x), within 2.5 ulp."""
    return div_rn(x, float32(1.0) + exp(-x))


@cuda.jit(device=True, forceinline=True)
def softplus(x):
    """log(1 + e**x) = max(x, 0) + log(1 + e**-|x|), within 3 ulp."""
    e = exp(-abs(x))
    return float_max(x, float32(0.0)) + _two_atanh(div_rn(e, float32(2.0) + e))


@cuda.jit(device=True, forceinline=True)
def rsqrt(x):
    """1 / sqrt(x) in two correctly rounded steps, within 1.5 ulp (`rsqrt.approx` differs between cards)."""
    return div_rn(float32(1.0), sqrt_rn(x))


@cuda.jit(device=True, forceinline=True)
def sincos(x):
    """(sin x, cos x) within 2 ulp or 2**-26 absolute for |x| < 2**20: pi/2 in three parts, polynomials."""
    n, nf = _nearest(x * float32(0.6366197723675814))
    r = cuda.fma(nf, float32(-1.5707963705062866), x)
    r = cuda.fma(nf, float32(4.371139000186241e-08), r)
    r = cuda.fma(nf, float32(1.7151245100059058e-15), r)
    t = r * r
    s = cuda.fma(t, float32(2.7557319223985893e-06), float32(-1.984126984126984e-04))
    s = cuda.fma(s, t, float32(8.333333333333333e-03))
    s = cuda.fma(s, t, float32(-1.0 / 6))
    s = cuda.fma(s * t, r, r)
    c = cuda.fma(t, float32(-2.7557319223985888e-07), float32(2.48015873015873e-05))
    c = cuda.fma(c, t, float32(-1.388888888888889e-03))
    c = cuda.fma(c, t, float32(1.0 / 24))
    c = cuda.fma(c, t, float32(-0.5))
    c = cuda.fma(c, t, float32(1.0))
    if n & int32(1):
        s, c = c, -s
    if n & int32(2):
        s, c = -s, -c
    return s, c
