"""What every kernel of the engine must be on the target hardware: no instruction that throttled cards lack the pipe for
(tensor, fp64), none that differs between cards (approximate), no register spilled on sm_70, and where launches overlap,
nothing before its time."""

import inspect
import itertools
import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

import qengine
from kernels import advance, assembler, attend_decode, attention, block_sparse, checkpoint
from kernels import compile as compiler
from kernels import (decode_tensor, decode_tile, draft_head, draft_input, draft_list, expert_gemm, expert_gemv,
                     float_matmul, gdn_decode, half_gemm, host_requests, kv_cache, kv_expand, layer_norm, ngram, norm,
                     patch_rope, patches, picture_attention, pool, q8_gemv, quantize, rope, route)
from kernels.card import MAX_THREADS, Array, most_threads
from kernels.emulated.card import EmulatedCard
from kernels.formats import FORMATS
from kernels.kv_formats import KV_FORMATS
from kernels.limits import FLOAT16
from kernels.quant_gemv import PACKED, decoder
from kernels.records import CHECK_ROWS
from kernels.rope import QWEN3, QWEN35
from tests.kinds import FIRST, KV_KINDS
from tests.models import write_as_float32
from tests.oracle import DATA
from tests.tiny import tiny_engine

FORBIDDEN = {
    "tensor core": r"\b(mma|wmma|ldmatrix)\b",
    "fp64": r"\.f64\b",
    "approximate": r"\.approx\b",
    "contracted by the assembler": r"\b(add|sub|mul)(\.sat)?\.f(16|32)(x2)?\b",  # without .rn ptxas may fuse them
}
# The variants of kernels for cards whose tensor cores were found whole: `--products tensor` launches them everywhere.
VARIANTS = {"gemm_tensor_kernel"}
TARGET = (7, 0)
Q8_0 = FORMATS["Q8_0"]


def engine_kernels(directory):
    """(kernel, argument types) of every launch of Q8_0 and float models, greedy and drawn, prompt and answer."""
    small = directory / "float.gguf"
    write_as_float32(DATA / "tiny-Q8_0.gguf", small)
    loaded = [qengine.load(str(file), card="emulated", ctx=256, progress=False)
              for file in (DATA / "tiny-Q8_0.gguf", small)]
    used = set()
    for engine in (tiny_engine(), *loaded):
        for temperature in (0.0, 1.0):
            request = qengine.Request(list(range(70)), max_tokens=3, temperature=temperature, seed=1, top_logprobs=0)
            engine.submit(request).wait()
        engine.evaluate(list(range(9)))
        used |= set(engine.cards[0]._functions)
    for engine in loaded:
        engine.close()
    return sorted(used, key=lambda key: (key[0].__name__, key[1:]))


def products_of_real_cards(format, columns, widths, every_tile=False):
    """The decode products of a format in the shapes that the emulated card does not use: of these numbers of columns
    for a warp, of 17,408, 3,584 and 9,216 numbers too (down of 27B, 0.8B and 4B) and, after the norm, of rows of these
    widths; of tiles every shape, or the last alone."""
    card, fmt = SimpleNamespace(kind="cuda", n_sms=80), decoder(format)
    w = "int8[1]" if format.bits == 8 else "uint8[1]", "uint16[1]"
    x, y, norm = ("int8[1]", "float32[1]"), ("float32[1]", "uint32"), ("float32[1]", "float32[1]", "float32")
    for n, k, rows in [*((n, 4096, 4096) for n in columns), (1, 17_408, 5120), (1, 3584, 1024),
                       *((min(columns[-1], 4), *sizes) for sizes in ((3584, 1024), (9216, 2560)))]:
        kernel = q8_gemv.gemv_kernel(fmt, n, q8_gemv.shape_for(card, fmt, n, k, n=rows), False, fmt.planes and n == 1)
        yield kernel, *y, *w, *x, *["uint32"] * 6, "bool"
    for n in columns:
        kernel = q8_gemv.swiglu_kernel(fmt, n, q8_gemv.shape_for(card, fmt, n, 4096, True), False)
        yield kernel, *x, *w, *x, *["uint32"] * 6
    for k in widths:
        kernel = q8_gemv.gemv_kernel(fmt, 1, q8_gemv.shape_for(card, fmt, 1, k), True, fmt.planes)
        yield kernel, *y, *w, *norm, *["uint32"] * 4
    kernel = q8_gemv.swiglu_kernel(fmt, 1, q8_gemv.shape_for(card, fmt, 1, 4096, True), True)
    yield kernel, *x, *w, *norm, *["uint32"] * 4
    shapes = decode_tile.shapes_of(format)
    for shape in shapes if every_tile else shapes[-1:]:     # the last needs most registers
        yield decode_tile.tile_kernel(format, shape, False), *y, *w, *x, *["uint32"] * 5, "bool"
    yield decode_tile.tile_kernel(format, shapes[-1], True), *x, *w, *x, *["uint32"] * 5


def products_on_tensor_cores(format):
    """Those of decode steps with several columns, which throttled cards never compile."""
    w, x = ("int8[1]" if format.bits == 8 else "uint8[1]", "uint16[1]"), ("int8[1]", "float32[1]")
    shape = decode_tensor.SHAPES["64 x 8"]
    yield (decode_tensor.tensor_kernel(format, shape, False, True), "float32[1]", "uint32", *w, *x, *["uint32"] * 3,
           "bool")
    yield decode_tensor.tensor_kernel(format, shape, True, True), *x, *w, *x, *["uint32"] * 3


def attention_of_other_heads(format):
    """The kernels of attention for heads that no model of these tests has, and for the most and the fewest heads that
    share a KV head."""
    x, rotary = "float32[1]", ("int32[1]", "float32[1]")
    yield rope.query_kernel(*QWEN3, format.turned), "float16[1]", x, x, *rotary, *["uint32"] * 5, "float32"
    yield from pages_of(format, QWEN3)
    if not format.expands:
        yield tiles_of(format, QWEN3, True)
    for group, shape, early, width, rows, quantized in (    # the last as in test_attend_decode.py, which compiles these
            (1, QWEN3, False, 1, 1, False), (8, QWEN3, True, 1, 1, True), (8, QWEN35, False, 1, 1, False),
            (4, QWEN35, False, 8, 1, False), (8, QWEN35, False, 8, 1, False), (8, QWEN3, False, 8, 1, True),
            (4, QWEN35, False, 8, 2, True), (4, QWEN3, False, 8, 2, False)):
        if rows <= attend_decode.rows_of_block(format, group, attend_decode.MANY_ANSWERS, width):
            yield attend_of(format, group, shape, early, width, rows, quantized)


def attention_in_few_bits(format):
    """What most engines launch for pages of few bits."""
    yield from pages_of(format, QWEN35)
    for width in 1, CHECK_ROWS:
        yield attend_of(format, 4, QWEN35, False, width, 1)


def pages_of(format, shape):
    """What writes pages, and what reads them for prompts."""
    x, i = "float32[1]", ("int32[1]",) * 3
    page = (f"{np.dtype(format.keys.dtype).name}[1]",) * 2
    yield (kv_cache.store_kernel(format, *shape[:2]), *page, x, x, "int32[1]", x, *i, *["uint32"] * 8, "float32")
    yield tiles_of(format, shape, False)
    yield from sparse_of(format, shape)
    if format.expands:
        yield kv_expand.expand_kernel(format, shape[0]), *["float16[1]"] * 2, *page, *i, *["uint32"] * 4


def tiles_of(format, shape, packed, kept=False):
    x, half, i = "float32[1]", "float16[1]", "int32[1]"
    kernel = attention.tiles_kernel(format.expands, shape[0], shape[2], packed, kept)
    return kernel, x, half, x, half, half, *[i] * 4, "uint32[1]" if kept else i, x, *["uint32"] * 8


def sparse_of(format, shape):
    """What reads pages for sparse prompts."""
    x, half, i, words, n = "float32[1]", "float16[1]", "int32[1]", "uint32[1]", "uint32"
    yield tiles_of(format, shape, False, True)
    yield block_sparse.means_kernel(shape[0])[0], half, half, n, n
    yield block_sparse.levels_kernel(format.expands, shape[0]), x, half, half, i, i, i, *[n] * 9
    yield block_sparse.keep_pages, words, words, x, "uint64[1]", i, i, *[n] * 13


def attend_of(format, group, shape, early, width, rows, quantized=True):
    x, i = "float32[1]", ("int32[1]",) * 3
    page = (f"{np.dtype(format.keys.dtype).name}[1]",) * 2
    kernel = attend_decode.attend_kernel(format, group, *shape, quantized, early, width, rows)
    return (kernel, "int8[1]" if quantized else x, x, x, "uint32[1]", x, x, x, "int32[1]", x, *page, *i,
            *["uint32"] * 10, "float32")


def kernels_of_pooling():
    """What a pooling model launches behind its layers."""
    yield pool.pool_kernel, *["float32[1]"] * 3, "int32[1]", "uint32", "float32"
    yield quantize.quantize_rest_kernel, "int8[1]", "float32[1]", "float32[1]", "uint32"


def kernels_of_lists(*names):
    """The products of the draft block's head with the tokens of a slot's list, in these formats."""
    x, i = "float32[1]", "int32[1]"
    for name in names:
        w = ("int8[1]" if FORMATS[name].bits == 8 else "uint8[1]"), "uint16[1]"
        yield draft_list.kernel(name), x, i, i, *w, "int8[1]", x, "uint32", "uint32"


def draft_kernels():
    """Those of the draft block that nothing else launches."""
    i, x, words = "int32[1]", "float32[1]", "uint32[1]"
    yield draft_input.draft_rows_kernel, *[i] * 11, *["uint32"] * 4
    yield draft_input.keep_hidden_kernel, x, x, i, "uint32", "uint32"
    yield draft_head.draft_kernel, *[i] * 9, x, words, words, i, *["uint32"] * 6
    yield from kernels_of_lists("Q8_0", *FIRST.values())
    for name, w in ("F32", x), ("F16", "uint16[1]"), ("BF16", "uint16[1]"):
        yield draft_list.kernel(name), x, i, i, w, x, "uint32", "uint32"
    for store, out in (norm.store_quantized, "int8[1]"), (norm.store_plain, x):
        yield draft_input.input_kernel(store), out, *[x] * 4, i, i, *[x] * 3, "uint32", "float32"


def kernels_of_routing():
    """The router of a mixture of experts, for the fewest, the usual and the most experts, alone and behind the norm;
    the groups of its pairs, and the choices that a benchmark makes up."""
    i, x, n = "int32[1]", "float32[1]", "uint32"
    for k, *which in (256, 1, 2), (2048, 8, 8), (4096, 16, 10):
        yield route.route_kernel(*which), i, x, x, *[n] * 3
        for rows in 1, min(8192 // k, route.MOST_ROWS):
            behind_norm = route.norm_route_kernel(k, *which, rows, route.REAL)
            yield behind_norm, i, x, x, "uint32[1]", "int8[1]", x, x, x, x, n, n, "float32"
    yield route.group_kernel, *[i] * 5, *[n] * 3
    yield route.route_like_kernel, *[i] * 3, *[n] * 6


def decode_products_of_experts(format, shared):
    """The decode products of experts in the shapes of real cards, with and without a shared expert's matrix: of rows
    that share tiles by two, of whole tiles and of others."""
    card, decoders = SimpleNamespace(kind="cuda", n_sms=80), [decoder(format), decoder(shared)]
    w, shared_w = (("int8[1]" if f.bits == 8 else "uint8[1]", "uint16[1]") for f in (format, shared))
    x, y, experts, n = ("int8[1]", "float32[1]"), "float32[1]", ("uint64[1]", "int32[1]"), "uint32"
    words, q, answer = "uint32[1]", "int8[1]", ("float32[1]", "float32[1]", "uint32[1]", "uint32[1]", n, n)
    request = "float32[1]", words, "int32[1]", n, q, "float32[1]", words, n, n
    for k, n_used in (512, 8), (1024, 8), (1056, 10):
        shapes = [expert_gemv.shape_of(card, d, k, 2048) for d in decoders]
        yield expert_gemv.gemv_kernel(decoders[0], shapes[0]), y, n, *w, *experts, *x, n, n, n
        warps = expert_gemv.warps_of(card, 4, n_used, *shapes)
        shapes = [shape._replace(warps=warps) for shape in shapes]
        for which, of_shared in ((*decoders, *shapes), shared_w), ((decoders[0], None, shapes[0], None), w):
            for asking in ((), answer) if n_used == 8 else ((),):
                kernel = expert_gemv.down_kernel(which[0], which[2], which[1], which[3], which[1] is None, bool(asking))
                yield (kernel, y, *w, *experts, y, *x, *[n] * 4, y, *of_shared, *x, n, *asking)
    for k in 2048, 2080:
        shapes = [expert_gemv.shape_of(card, d, k, in_pairs=True) for d in decoders]
        for which, of_shared in ((shapes[0], decoders[1], shapes[1]), shared_w), ((shapes[0], None, None), w):
            for asking in (), request:
                kernel = expert_gemv.swiglu_kernel(decoders[0], *which, bool(asking))
                yield (kernel, *x, *w, *experts, *x, n, n, n, *x, *of_shared, n, *asking)


def kernels_of_checks():
    """Those between two checks of several rows."""
    i, u, n = "int32[1]", "uint32[1]", "uint32"
    yield advance.advance_kernel, *[i] * 8, n, n
    yield ngram.ngram_kernel, *[i] * 4, u, u, n
    yield ngram.script_kernel, *[i] * 3, n, n


def checks_of_the_delta_rule():
    """The kernels of the delta rule where drafts are made: of one row and of several."""
    x, i, n = "float32[1]", "int32[1]", "uint32"
    for out, most in itertools.product(("int8[1]", x), (1, CHECK_ROWS)):
        yield (gdn_decode.decode_kernel(out == "int8[1]", False, True, most), out, *[x] * 3, i, *[x] * 3, n, *[x] * 4,
               i, i, *[n] * 3, "float32")


def kernels_of_experts():
    """Products of prompts with experts, of Q8_0 and of floats, those of floats in decode steps and without experts, and
    the sum."""
    i, x, n, places = "int32[1]", "float32[1]", "uint32", "uint64[1]"
    for height in expert_gemm.HEIGHTS:
        kernel = expert_gemm.grouped(Q8_0, height)
        yield kernel, x, "int8[1]", "uint16[1]", "int8[1]", x, places, *[i] * 3, *[n] * 4
    for stored in expert_gemm.WEIGHT_AT:
        w = x if stored == np.float32 else "uint16[1]"
        for each in 4, 1:
            yield (expert_gemm.float_kernel(stored, float_matmul.TALLEST, each), x, w, x, places, *[i] * 3,
                   *[n] * 4)
            for shape in float_matmul.SHAPES if stored == np.float32 else [float_matmul.TALLEST]:
                yield float_matmul.gemm_kernel(stored, shape, each), x, w, x, *[n] * 4, "bool"
        yield expert_gemm.FLOAT_GEMV[stored], x, w, x, places, i, *[n] * 4
    for n_used, is_shared in (8, True), (1, False), (31, True):
        yield expert_gemm.combine_kernel(n_used, is_shared), x, x, i, x, x, n


def kernels_beside_the_host():
    """What a card launches that leaves experts to the host's processor."""
    i, x, words, n, q = "int32[1]", "float32[1]", "uint32[1]", "uint32", "int8[1]"
    yield host_requests.hand_over_kernel, i, "uint64[1]", q, x, n, n, n, x, words, i, n, q, x, words, n, n


def kernels_of_vision():
    """The vision tower: all endings of products in each shape, heads of published towers and the widest."""
    x, h, u8, i, n = "float32[1]", "float16[1]", "uint8[1]", "int32[1]", "uint32"
    yield patches.cut_patches_kernel, h, u8, i, i, n
    yield patches.add_positions_kernel, x, x, i, x, n, n
    yield layer_norm.layer_norm_kernel, h, x, x, x, n, n, "float32"
    for head_dim in 72, picture_attention.MOST_DIM:
        yield patch_rope.rotate_kernel(head_dim), h, i, x, n, n, "float32"
        yield picture_attention.attention_kernel(head_dim), "uint16[1]", h, i, n
    for name, ending in half_gemm.ENDINGS.items():
        for shape in half_gemm.SHAPES:
            y = f"{np.dtype(ending.dtype).name}[1]"
            yield half_gemm.gemm_kernel(shape, name), y, h, x, h, n, n, n


def products_of_q8_0(every_tile=False):
    return products_of_real_cards(Q8_0, [1, 2, 4, 8], [4096, 5120], every_tile)         # columns between need less


def packed_products(name):
    return products_of_real_cards(FORMATS[name], [1, 2], [4096, 5120])


def every_other(kernels, number):
    """Half of the kernels. For the next number, the other half: so of formats that take turns each half has all of the
    kernels. Slow tests have both halves of each."""
    return [*dict.fromkeys(kernels)][number % 2::2]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if TARGET not in compiler.supported_ccs():
        pytest.skip("the installed CUDA toolkit cannot compile for sm_70")
    packed = [kernel for i, name in enumerate(FIRST.values()) for kernel in every_other(packed_products(name), i)]
    products = [*products_of_q8_0(), *packed]
    attentions = [*attention_of_other_heads(KV_FORMATS[FLOAT16]),
                  *(kernel for name in KV_KINDS for kernel in attention_in_few_bits(KV_FORMATS[name]))]
    keeping = checkpoint.keep_states_kernel, *["float32[1]"] * 2, "int32[1]", *["float32[1]"] * 2, *["int32[1]"] * 3, \
        *["uint32"] * 6
    experts = [*decode_products_of_experts(Q8_0, Q8_0),
               *every_other(decode_products_of_experts(FORMATS["Q4_K"], Q8_0), 0)]
    others = *products, *experts, *attentions, *kernels_of_pooling(), *draft_kernels(), *kernels_of_routing(), \
        *kernels_of_experts(), *kernels_of_checks(), *checks_of_the_delta_rule(), keeping, *kernels_beside_the_host(), \
        *kernels_of_vision()
    return list(dict.fromkeys([*engine_kernels(tmp_path_factory.mktemp("models")), *others]))


def test_the_pipes_of_the_engine(kernels):
    assert len(kernels) > 20
    everything = check_pipes(kernels)
    assert "dp4a.s32.s32" in everything and "fma.rn.f16x2" in everything


def check_pipes(kernels):
    """Returns the PTX of all of them."""
    everything = ""
    for kernel, *types in kernels:
        ptx = compiler.compile_kernel(kernel, tuple(types), TARGET).ptx
        for what, pattern in FORBIDDEN.items():
            found = re.search(pattern, ptx)
            assert not found, f"{kernel.__name__}: {what}: {ptx[found.start() - 20:found.end() + 40]!r}"
        everything += ptx
    return everything


def test_tensor_cores_are_for_variants_alone():
    """An engine that is asked for tensor cores launches the variants beside the kernels of every engine, and no
    other."""
    launched = {}
    for wish in "dp4a", "tensor":
        card = EmulatedCard()
        engine = qengine.load(str(DATA / "tiny-Q8_0.gguf"), card=card, ctx=128, progress=False, products=wish)
        engine.submit(qengine.Request(list(range(70)), max_tokens=3)).wait()
        engine.close()
        launched[wish] = {kernel.__name__: (kernel, *types) for kernel, *types in card._functions}
    more = launched["tensor"].keys() - launched["dp4a"].keys()
    assert more == VARIANTS and "gemm_q8_q8_kernel" in launched["dp4a"].keys() - launched["tensor"].keys()
    for name, (kernel, *types) in launched["tensor"].items():
        ptx = compiler.compile_kernel(kernel, tuple(types), TARGET).ptx
        assert bool(re.search(FORBIDDEN["tensor core"], ptx)) == (name in VARIANTS)


def test_no_register_is_spilled_on_sm_70(kernels):
    check_spills(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("format", [Q8_0, *PACKED], ids=lambda format: format.name)
def test_no_kernel_of_a_format_spills(format):
    """What `kernels` leaves out of a format, too."""
    if TARGET not in compiler.supported_ccs():
        pytest.skip("the installed CUDA toolkit cannot compile for sm_70")
    products = products_of_q8_0(every_tile=True) if format is Q8_0 else packed_products(format.name)
    everything = [*products, *kernels_of_lists(format.name), *decode_products_of_experts(format, Q8_0)]
    check_pipes(everything)
    check_spills(everything)


@pytest.mark.slow
@pytest.mark.parametrize("format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_no_kv_format_spills(format):
    """What `kernels` leaves out of a format of few bits."""
    if TARGET not in compiler.supported_ccs():
        pytest.skip("the installed CUDA toolkit cannot compile for sm_70")
    check_spills([*attention_of_other_heads(format), *attention_in_few_bits(format)])


@pytest.mark.slow
@pytest.mark.parametrize("group, shape", [(2, QWEN35), (3, QWEN35), (2, QWEN3), (4, QWEN3)], ids=str)
@pytest.mark.parametrize("format", [format for format in KV_FORMATS.values() if format.expands], ids=str)
def test_no_warps_that_work_alone_spill(format, group, shape):
    """Of few bits, with numbers of heads that share a KV head in published models, and in no test above."""
    if TARGET not in compiler.supported_ccs():
        pytest.skip("the installed CUDA toolkit cannot compile for sm_70")
    check_spills(attend_of(format, group, shape, False, width, 1) for width in (1, CHECK_ROWS))


def check_spills(kernels):
    for kernel, *types in kernels:
        words = assembled(kernel, tuple(types), TARGET)
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", words)]
        assert spills and not any(spills), f"{kernel.__name__}{types}: {words}"


@cache
def assembled(kernel, types, cc):
    """What ptxas says of the registers that a kernel takes on an architecture. All get the PTX of TARGET: that of their
    own takes as many, and long to compile."""
    if not assembler.find_assembler():
        pytest.skip("ptxas of the toolkit is not installed")
    return assembler.run_assembler(assembler.find_assembler()[0], compiler.compile_kernel(kernel, types, TARGET), cc)[1]


REGISTERS = 65_536          # of an SM of every architecture here, for the threads of one block or of several


def block_registers(kernel, types, cc):
    """Registers of the largest block of threads that a kernel may be launched with. A thread gets them by eights."""
    n = max(map(int, re.findall(r"Used (\d+) registers", assembled(kernel, types, cc))))
    return -(-n // 8) * 8 * most_threads(kernel)


@pytest.mark.parametrize("cc", [TARGET, (7, 5), (9, 0)], ids=str)
def test_a_block_of_threads_fits_the_registers_of_an_sm(kernels, cc):
    """A card refuses to launch it otherwise. Where a kernel has no launch bounds, a block may be as large as any: who
    needs more than 64 registers must say how many threads share them. The assembler keeps within bounds by itself, on
    every architecture alike."""
    if cc not in compiler.supported_ccs():
        pytest.skip(f"the installed CUDA toolkit cannot compile for {cc}")
    bounded = [launch for launch in kernels if most_threads(launch[0]) < MAX_THREADS]
    assert bounded and len(bounded) < len(kernels)
    for kernel, *types in kernels if cc == TARGET else [launch for launch in kernels if launch not in bounded]:
        n = block_registers(kernel, tuple(types), cc)
        assert n <= REGISTERS, f"{kernel.__name__}{types}: {most_threads(kernel)} threads take {n} registers"


def test_a_block_that_takes_too_many_registers_is_found():
    """The kernel of sums of rows takes 71 registers if it is not told that 1,024 threads share them."""
    launch = tuple(next(kernels_of_pooling()))
    unbounded = cuda.jit(pool.pool_kernel.py_func)
    assert block_registers(unbounded, launch[1:], TARGET) > REGISTERS >= block_registers(
        pool.pool_kernel, launch[1:], TARGET)


# ---- launches that overlap ---------------------------------------------------------------------------------

OVERLAPPING = (9, 0)        # the first that can
WAIT = "griddepcontrol.wait;"
# The arguments that a kernel may read before it waits: weights, which no kernel writes; slots and positions of a batch,
# which `advance` writes at the start of a step and the next kernel finds written. `accept` counts the draws in
# `parameters`, which the first two kernels of the sampler do not read (and see WRITTEN).
CONSTANTS = {
    "gemv_kernel": {"wq", "wd"}, "planes_gemv_kernel": {"wq", "wd"}, "norm_gemv_kernel": {"wq", "wd", "norm_w"},
    "gemv_swiglu_kernel": {"wq", "wd"}, "norm_gemv_swiglu_kernel": {"wq", "wd", "norm_w"},
    "tile_kernel": {"wq", "wd"}, "tile_swiglu_kernel": {"wq", "wd"},
    "decode_tensor_kernel": {"wq", "wd"}, "decode_tensor_swiglu_kernel": {"wq", "wd"},
    "gdn_decode_kernel": {"conv_w", "ssm_a", "dt_bias", "norm_w", "row_slot"},
    "attend": set(), "rms_norm_quantize_kernel": {"w"},
    "norm_route_kernel": {"router", "norm_w"}, "group_kernel": set(), "route_like_kernel": set(),
    "find_best": {"row_slot", "row_pos", "parameters"}, "weigh": {"row_slot", "row_pos", "parameters"},
    "choose": {"row_slot", "row_pos"}, "accept_kernel": set(),
    "draft_rows_kernel": set(), "draft_input_kernel": set(), "draft_kernel": set(), "listed_kernel": set(),
    "advance_kernel": set(), "ngram_kernel": set(), "script_kernel": set(),
    "hand_over_kernel": set(), "expert_gemv_kernel": set(),
    "expert_swiglu_kernel": {"shared_wq", "shared_wd"}, "asking_swiglu_kernel": {"shared_wq", "shared_wd"},
    "expert_down_kernel": {"places", "experts", "shared_wq", "shared_wd"},
    "asking_down_kernel": {"places", "experts", "shared_wq", "shared_wd"},
}
# Of the latter, `places` do not change during a step. The router writes `experts`, and expert_down comes behind a
# kernel that waited for the router before it let expert_down begin.
LET_AFTER_THE_WAIT = {"expert_gemv_kernel", "expert_swiglu_kernel", "expert_down_kernel", "asking_swiglu_kernel",
                      "asking_down_kernel"}
# And what those that are `early` may read besides: constants and what earlier steps left. Blocks of `attend` beyond the
# last unit may end: the others of the launch wait, so that it does not end before.
EARLY = {"gdn_decode_kernel": {"state", "ring", "accepted", "vectors", "keeps", "row_pos"},
         "attend": {"q_norm", "k_norm", "inv_freq", "rope_pos", "row_slot", "row_pos", "block_table", "k_pages",
                    "v_pages"}}


def is_early(kernel):
    return inspect.getclosurevars(kernel.py_func).nonlocals.get("early", False)


def allowed(kernel):
    """(arguments that it may read before it waits, lines that it may run)."""
    name = kernel.__name__
    return (CONSTANTS[name] | EARLY[name], {"ret;"} if name == "attend" else set()) if is_early(kernel) else (
        CONSTANTS[name], set())


def before_the_wait(ptx):
    """The lines that may run before WAIT: from the start of the kernel along every branch."""
    lines = [line.strip() for line in ptx[ptx.index(".entry"):].splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    reached, todo = set(), [0]
    while todo:
        at = todo.pop()
        if at not in reached and lines[at] != WAIT:
            reached.add(at)
            todo += [labels[label] for label in re.findall(r"\bbra\S*\s+(\$\w+)", lines[at])]
            todo += [at + 1] if not re.match(r"bra|ret|exit", lines[at]) else []
    return [lines[at] for at in sorted(reached)]


def origins(register, made_of):
    """The parameters of the kernel that the value of a register comes from."""
    found, todo = set(), [register]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += made_of.get(name, [])
    return {int(name.rpartition("_")[2]) for name in found if "_param_" in name}


def too_early(kernel, types, ptx):
    """What a kernel does before WAIT and may not: the lines that write or end it, and the arguments that it reads."""
    owners = []             # of each parameter: the array that it is a part of, of 5 and 2 for each dimension
    for name, kind in zip(inspect.signature(kernel.py_func).parameters, types, strict=True):
        owners += [name] * (5 + 2 * int(kind[-2])) if kind.endswith("]") else [None]
    readable, runnable = allowed(kernel)
    lines, made_of = before_the_wait(ptx), {}
    for line in lines:
        if step := re.match(r"(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{.*?\}|[^,;]*),(.*);", line):
            for result in re.findall(r"%\w+", step[1]):
                made_of.setdefault(result, []).extend(re.findall(r"%\w+|\w+_param_\d+", step[2]))
    wrong = [line for line in lines if line not in runnable and re.match(
        r"(@!?%p\d+\s+)?(st\.(?!shared|local)|atom|red\b|ret|exit|call|brx)", line)]
    for line in lines:
        if load := re.search(r"\b(?:ld\.(?!param|shared|local)|cp\.async\.c).*\[(%\w+)", line):
            read = {owners[n] for n in origins(load[1], made_of)} - {None}
            wrong += sorted(read - readable)
    return wrong


def early_delta_rule(kernel, out, *_):
    """The early form; of a check that where each block has an SM for itself."""
    constants = inspect.getclosurevars(kernel.py_func).nonlocals
    most = constants["most"]
    return gdn_decode.decode_kernel(out == "int8[1]", True, constants["keeps_records"], most, most > 1)


EARLY_TWINS = {     # by the kernel and the types of the arguments, the first of which is the output's
    "gdn_decode_kernel": early_delta_rule,
    "attend": lambda _, out, *__: attend_decode.attend_kernel(KV_FORMATS["float16"], 6, *QWEN35, out == "int8[1]",
                                                              True, 1),
}


# By the kernel: the constants that decide what it does before it waits. Others, the formats of pages and the kind of
# output have effects behind that alone. The products of experts read their format's weights, of which only the type
# counts.
DECISIVE = {"attend": ("early", "width", "rows"), "gdn_decode_kernel": ("early", "most"),
            **{name: ("has_shared", "rows") for name in LET_AFTER_THE_WAIT}}


def constants_of(kernel):
    """Those of the device function `begin`, too, if the kernel calls one."""
    own = inspect.getclosurevars(kernel.py_func).nonlocals
    return (constants_of(own["begin"]) if "begin" in own else {}) | own


def order_of_loads(kernel, *types):
    """What is the same for kernels that do the same before they wait."""
    constants, name = constants_of(kernel), kernel.__name__
    own = tuple(constants.get(each) for each in DECISIVE[name]) if name in DECISIVE else kernel
    return name, own, None if name in EARLY else types


@pytest.fixture(scope="module")
def overlapping(kernels):
    """(kernel, argument types, PTX) of those that wait: the products as real cards have them, with and without a
    minimum in their format, and the others, with their early forms."""
    with_minimum = next(format for format in PACKED if format.minima)
    products = [product for format in (Q8_0, with_minimum)
                for product in (*products_of_real_cards(format, [1], [4096]), *products_on_tensor_cores(format))]
    names = {kernel.__name__ for kernel, *_ in products}
    others = [launch for launch in kernels if launch[0].__name__ not in names]
    waiting = {order_of_loads(*launch): launch for launch in reversed((*products, *others))
               if "wait_for_previous" in launch[0].py_func.__code__.co_names}
    waiting = list(reversed(waiting.values()))
    assert {kernel.__name__ for kernel, *_ in waiting} == set(CONSTANTS)
    twins = [(EARLY_TWINS[kernel.__name__](kernel, *types), *types) for kernel, *types in waiting
             if kernel.__name__ in EARLY]
    waiting += {twin[0]: twin for twin in twins}.values()
    return [(kernel, types, compiler.compile_kernel(kernel, tuple(types), OVERLAPPING).ptx)
            for kernel, *types in waiting]


def test_nothing_is_done_before_the_kernel_before_has_ended(overlapping):
    """Several kernels before it may be running still: what they read must stay and what they write is not there yet.
    One that ended without having waited would let the next begin before them, too."""
    for kernel, types, ptx in overlapping:
        assert ptx.count(WAIT) == 1 and not too_early(kernel, types, ptx), f"{kernel.__name__}{types}"


def test_products_of_experts_let_the_next_begin_when_the_router_has_ended(overlapping):
    found = [(kernel, ptx) for kernel, _, ptx in overlapping if kernel.__name__ in LET_AFTER_THE_WAIT]
    assert {kernel.__name__ for kernel, _ in found} == LET_AFTER_THE_WAIT
    for kernel, ptx in found:
        assert not any("launch_dependents" in line for line in before_the_wait(ptx)), kernel.__name__


@pytest.mark.parametrize("early", ["st.global.u32 [%rd1], %r1;", "@%p1 red.global.add.u32 [%rd1], 1;", "@!%p1 ret;",
                                   "atom.acq_rel.gpu.add.u32 %r0, [%rd1], 1;"])
def test_what_is_done_too_early_is_found(overlapping, early):
    for kernel, types, ptx in overlapping:
        assert too_early(kernel, types, ptx.replace(WAIT, f"{early}\n{WAIT}", 1)) == [early]


def test_what_is_read_too_early_is_found(overlapping):
    """Without WAIT all is too early."""
    read = {"tile_kernel": "xq", "tile_swiglu_kernel": "xd", "decode_tensor_kernel": "xq",
            "decode_tensor_swiglu_kernel": "xd", "gemv_kernel": "xq", "norm_gemv_kernel": "x",
            "gemv_swiglu_kernel": "xd", "norm_gemv_swiglu_kernel": "x",
            "planes_gemv_kernel": "xq", "gdn_decode_kernel": "projected", "attend": "projected",
            "rms_norm_quantize_kernel": "x", "norm_route_kernel": "x", "group_kernel": "experts",
            "route_like_kernel": "positions",
            "find_best": "logits", "weigh": "best", "choose": "progress", "accept_kernel": "tokens",
            "draft_rows_kernel": "outcomes", "draft_input_kernel": "x", "draft_kernel": "logits",
            "listed_kernel": "listed", "advance_kernel": "outcomes", "ngram_kernel": "outcomes",
            "script_kernel": "outcomes", "hand_over_kernel": "experts",
            "expert_gemv_kernel": "experts", "expert_swiglu_kernel": "experts", "expert_down_kernel": "weights",
            "asking_swiglu_kernel": "experts", "asking_down_kernel": "weights"}
    for kernel, types, ptx in overlapping:
        assert read[kernel.__name__] in too_early(kernel, types, ptx.replace(WAIT, ""))


# What the kernels of decode passes write of that which others of them read before they wait.
WRITTEN = {"gdn_decode_kernel": {"state", "ring", "vectors", "keeps"}, "attend": {"k_pages", "v_pages"},
           "accept_kernel": {"parameters"}, "advance_kernel": {"slots", "positions", "rope", "accepted"}}


def read_too_early(launches, let_begin=()):
    """(launches that are early, what any reads too early) of (kernel, arguments) in the order in which they run: what
    was written from the last launch on that does not overlap, or behind the last one that lets no other begin.
    let_begin: names of kernels that count as if they waited and let others begin."""
    n_early, wrong, written = 0, [], []
    for kernel, args in launches:
        name, parameters = kernel.__name__, inspect.signature(kernel.py_func).parameters
        memory = {of: range(value.ptr, value.ptr + value.nbytes)
                  for of, value in zip(parameters, args, strict=True) if isinstance(value, Array)}
        if "wait_for_previous" in kernel.py_func.__code__.co_names:
            n_early += is_early(kernel)
            wrong += [f"{name}: {of}" for of, other in itertools.product(allowed(kernel)[0], written)
                      if max(memory[of].start, other.start) < min(memory[of].stop, other.stop)]
        elif name not in let_begin:
            written.clear()
        written += [memory[of] for of in WRITTEN.get(name, ())]
        if "let_next_begin" not in kernel.py_func.__code__.co_names and name not in let_begin:
            written.clear()
        if name in LET_AFTER_THE_WAIT:
            written.clear()     # what it writes itself, no kernel reads before it waits
    return n_early, wrong


@pytest.mark.parametrize("split", [(4,), (1, 2, 1)], ids=str)
def test_what_is_read_early_is_older_than_the_launches_that_overlap(split, monkeypatch):
    """In the order of the launches, since on no card of these tests they overlap. `advance` keeps a step apart from the
    one before: what it writes is there when the next kernel begins."""
    for module in gdn_decode, attend_decode:
        monkeypatch.setattr(module, "launches_overlap", lambda cc: True)
    monkeypatch.setattr(qengine.Pipeline, "load_kernels", lambda *arguments: None)      # no step is run
    cards = [EmulatedCard(number, memory_bytes=256 << 20) for number in range(len(split))]
    engine, found = qengine.load("synthetic:tiny", card=cards, split=split, ctx=256, slots=2, progress=False), []
    for stage in engine.pipeline.stages:
        for shape in qengine.StepShape(1), qengine.StepShape(2, 4, 3, True):
            launches = []
            with monkeypatch.context() as patch:
                patch.setattr(stage.card, "launch", lambda kernel, _, __, *args, **___: launches.append((kernel, args)))
                for _ in range(2):
                    stage.launch_step(shape, 0, 0)
            found.append(read_too_early(launches))
            assert {"attend: row_pos", "gdn_decode_kernel: row_pos"} & {
                *read_too_early(launches, {"advance_kernel", "keep_states_kernel", "embed_kernel"})[1]}
    engine.close()
    assert not any(wrong for _, wrong in found), found
    assert all(n_early for n_early, _ in found)
