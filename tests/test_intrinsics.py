"""Every function of kernels/intrinsics.py against integers or float64."""

import numpy as np
import pytest
from numba import cuda
from numba.types import uint32, uint64

from kernels import intrinsics
from kernels.compile import CompileError

EDGES = np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38,
                  -3.4028235e38, np.inf, -np.inf, np.nan, 8388609.0, 65504.0, 65519.9, 65520.0, 5.9e-8,
                  6.1e-5], np.float32)


def elementwise(function, n_inputs):
    """A kernel that writes function(inputs[i]...) to out[i]."""
    @cuda.jit
    def one(out, a, n):
        i = uint32(cuda.blockIdx.x * uint32(64) + cuda.threadIdx.x)
        if i < n:
            out[i] = function(a[i])

    @cuda.jit
    def two(out, a, b, n):
        i = uint32(cuda.blockIdx.x * uint32(64) + cuda.threadIdx.x)
        if i < n:
            out[i] = function(a[i], b[i])

    @cuda.jit
    def three(out, a, b, c, n):
        i = uint32(cuda.blockIdx.x * uint32(64) + cuda.threadIdx.x)
        if i < n:
            out[i] = function(a[i], b[i], c[i])

    return (one, two, three)[n_inputs - 1]


def apply(card, function, dtype, *inputs):
    """function of each element of `inputs`, computed on the card, as `dtype`."""
    n = len(inputs[0])
    out = card.alloc(n, dtype)
    card.poison(out)
    card.launch(elementwise(function, len(inputs)), -(-n // 64), 64, out, *map(card.upload, inputs), n)
    return card.download(out)


def any_words(rng, n=1000):
    return rng.integers(0, 2**32, n, np.uint32)


def any_floats(rng, n=1000):
    """Every exponent and the edges."""
    return np.r_[EDGES, any_words(rng, n).view(np.float32)]


def ulps(got, want):
    """The largest distance of float32 `got` from float64 `want` in units of the last place of `want`; where
    one is infinite or NaN both must be."""
    with np.errstate(over="ignore"):
        rounded = want.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    return (abs(got[finite] - want[finite]) / np.spacing(abs(rounded[finite])).astype(np.float64)).max()


# ---- integers ----------------------------------------------------------------------------------------------

def test_dot_products(card):
    rng = np.random.default_rng(0)
    a, b = any_words(rng), any_words(rng)
    a[:2], b[:2] = 0x80808080, (0x80808080, 0x7F7F7F7F)
    c = any_words(rng).view(np.int32)
    bytes_a, bytes_b, shorts_a = (x.view(t).reshape(len(a), -1).astype(np.int64)
                                  for x, t in ((a, np.int8), (b, np.int8), (a, np.int16)))

    def wrapped(total):
        return total.astype(np.uint32).view(np.int32)

    with np.errstate(over="ignore"):
        want = wrapped((bytes_a * bytes_b).sum(1) + c)
        assert (apply(card, intrinsics.dp4a, np.int32, a, b, c) == want).all()
        for function, half in ((intrinsics.dp2a_lo, slice(0, 2)), (intrinsics.dp2a_hi, slice(2, 4))):
            want = wrapped((shorts_a * bytes_b[:, half]).sum(1) + c)
            assert (apply(card, function, np.int32, a, b, c) == want).all()


def test_prmt(card):
    rng = np.random.default_rng(1)
    a, b, selector = any_words(rng), any_words(rng), any_words(rng) & 0x7777
    pool = np.c_[a, b].view(np.uint8)  # bytes 0..3 of a, then those of b
    want = np.stack([pool[np.arange(len(a)), selector >> 4 * i & 7] for i in range(4)], 1)
    assert (apply(card, intrinsics.prmt, np.uint32, a, b, selector) == want.view(np.uint32)[:, 0]).all()


def test_unbias_of_every_size(card):
    rng = np.random.default_rng(2)
    total = np.r_[-2**22, 2**22, 0, 1, -1, rng.integers(-2**22, 2**22, 1000)].astype(np.int32)
    got = apply(card, intrinsics.unbias, np.float32, total + np.int32(intrinsics.BIAS_WORD))
    np.testing.assert_array_equal(got, total)


def test_round_to_int(card):
    x = np.r_[EDGES[:9], np.random.default_rng(3).uniform(-2**31, 2**31, 1000), np.arange(-20, 20) / 2]
    x = x.astype(np.float32)
    np.testing.assert_array_equal(apply(card, intrinsics.round_to_int, np.int32, x), np.rint(x))


# ---- half precision ----------------------------------------------------------------------------------------

def any_halves(rng, n=2000):
    return np.r_[EDGES.astype(np.float16), rng.integers(0, 2**16, n).astype(np.uint16).view(np.float16)][:n]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_half2_arithmetic(card):
    rng = np.random.default_rng(4)
    a, b, c = (rng.permutation(any_halves(rng)) for _ in range(3))
    words = [x.view(np.uint32) for x in (a, b, c)]
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    # In float64 the product of two halves is exact; its sum with a third is too, or so one-sided (more than
    # 53 bits apart) that the half it rounds to is the larger part or infinity.
    for function, want, inputs in ((intrinsics.hadd2, a + b, 2), (intrinsics.hmul2, a * b, 2),
                                   (intrinsics.hfma2, a * b + c, 3)):
        got = apply(card, function, np.uint32, *words[:inputs]).view(np.float16)
        np.testing.assert_array_equal(got, want.astype(np.float16))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_half_conversions(card):
    rng = np.random.default_rng(5)
    every = np.arange(2**16).astype(np.uint16)
    got = apply(card, intrinsics.half_to_float, np.float32, every)
    np.testing.assert_array_equal(got, every.view(np.float16))
    x = np.r_[EDGES, (rng.standard_normal(2000) * np.exp2(rng.integers(-30, 20, 2000)))].astype(np.float32)
    got = apply(card, intrinsics.half_bits, np.uint16, x)
    np.testing.assert_array_equal(got.view(np.float16), x.astype(np.float16))
    y = rng.permutation(x)
    words = apply(card, intrinsics.pack_half2, np.uint32, x, y)
    np.testing.assert_array_equal(words.view(np.float16).reshape(-1, 2), np.c_[x, y].astype(np.float16))
    for function, element in ((intrinsics.half2_low, x), (intrinsics.half2_high, y)):
        np.testing.assert_array_equal(apply(card, function, np.float32, words), element.astype(np.float16))


# ---- float32 -----------------------------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore:divide", "ignore:invalid", "ignore:overflow")
def test_correctly_rounded(card):
    rng = np.random.default_rng(6)
    a, b = any_floats(rng, 20000), rng.permutation(any_floats(rng, 20000))
    np.testing.assert_array_equal(apply(card, intrinsics.div_rn, np.float32, a, b), a / b)
    np.testing.assert_array_equal(apply(card, intrinsics.sqrt_rn, np.float32, a), np.sqrt(a))
    np.testing.assert_array_equal(apply(card, intrinsics.float_max, np.float32, a, b), np.fmax(a, b))
    np.testing.assert_array_equal(apply(card, intrinsics.float_min, np.float32, a, b), np.fmin(a, b))


def test_bit_casts(card):
    words = any_words(np.random.default_rng(7))
    words = words[np.isfinite(words.view(np.float32))]
    assert (apply(card, intrinsics.float_as_word, np.uint32, words.view(np.float32)) == words).all()
    for typed in (words, words.view(np.int32)):
        assert (apply(card, intrinsics.word_as_float, np.float32, typed).view(np.uint32) == words).all()


@cuda.jit(device=True)
def sine(x):
    return intrinsics.sincos(x)[0]


@cuda.jit(device=True)
def cosine(x):
    return intrinsics.sincos(x)[1]


FUNCTIONS = [  # name, its float64 twin, range of the argument, ulp that its docstring allows
    ("exp", np.exp, (-104, 89), 1.1),
    ("exp2", np.exp2, (-150, 129), 1),
    ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), (-80, 80), 2.5),
    ("silu", lambda x: x / (1 + np.exp(-x)), (-80, 80), 2.5),
    ("softplus", lambda x: np.logaddexp(0, x), (-80, 80), 3),
]


@pytest.mark.parametrize("name, twin, span, bound", FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_float_functions(card, name, twin, span, bound):
    rng = np.random.default_rng(8)
    x = np.r_[EDGES[np.isfinite(EDGES) & (EDGES >= span[0]) & (EDGES <= span[1])], np.linspace(*span, 20000),
              rng.uniform(-1, 1, 20000), rng.standard_normal(20000) * np.exp2(rng.uniform(-20, 3, 20000))]
    x = x.astype(np.float32)
    got = apply(card, getattr(intrinsics, name), np.float32, x)
    assert ulps(got, twin(x.astype(np.float64))) <= bound


def test_exp_outside_its_range(card):
    x = np.array([-np.inf, -1e30, -104.1, 89.1, 1e30, np.inf, np.nan], np.float32)
    want = [0, 0, 0, np.inf, np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(apply(card, intrinsics.exp, np.float32, x), want)
    x[2:4] = -150.1, 129.1
    np.testing.assert_array_equal(apply(card, intrinsics.exp2, np.float32, x), want)


def test_log_and_rsqrt(card):
    rng = np.random.default_rng(9)
    x = np.exp2(np.r_[rng.uniform(-126, 128, 20000), rng.uniform(-1, 1, 20000), 0, -126]).astype(np.float32)
    assert ulps(apply(card, intrinsics.log, np.float32, x), np.log(x.astype(np.float64))) <= 3
    assert ulps(apply(card, intrinsics.rsqrt, np.float32, x), x.astype(np.float64) ** -0.5) <= 1.5


def test_sincos(card):
    rng = np.random.default_rng(10)
    x = np.r_[rng.uniform(-4, 4, 20000), rng.uniform(-2**20, 2**20, 20000), np.arange(1, 5000) * np.pi / 2, 0]
    x = x.astype(np.float32)
    for function, twin in ((sine, np.sin), (cosine, np.cos)):
        got, want = apply(card, function, np.float32, x), twin(x.astype(np.float64))
        allowed = np.maximum(2 * np.spacing(abs(want).astype(np.float32)), 2.0**-26)
        assert (abs(got - want) <= allowed).all()


OF_FLOATS = {"half_bits": 1, "pack_half2": 2, "div_rn": 2, "sqrt_rn": 1, "round_to_int": 1, "float_max": 2,
             "float_min": 2, "float_as_word": 1, "exp": 1, "exp2": 1, "log": 1, "sigmoid": 1, "silu": 1, "softplus": 1,
             "rsqrt": 1, "sincos": 1}      # name -> how many floats it takes
OF_BITS = {"half_to_float": 1, "half2_low": 1, "both_high": 1, "word_as_float": 1, "hadd2": 2, "dp4a": 3, "prmt": 3}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_a_float64_is_rounded_or_refused(card, name):
    """What is given as float64 counts as the nearest float32, or the kernel is not compiled."""
    x = np.random.default_rng(13).uniform(0.1, 3, 100)
    function = {"sincos": sine}.get(name, getattr(intrinsics, name))
    of_float32 = apply(card, function, np.float32, *[x.astype(np.float32)] * OF_FLOATS[name])
    try:
        of_float64 = apply(card, function, np.float32, *[x] * OF_FLOATS[name])
    except CompileError as error:
        assert "a float32 is wanted, not a float64: is a float32(...) missing?" in str(error)
    else:
        np.testing.assert_array_equal(of_float64, of_float32)


@pytest.mark.parametrize("name", OF_BITS)
def test_no_float_counts_as_bits(card, name):
    """It would become an integer unasked."""
    for dtype in np.float16, np.float32:
        with pytest.raises(CompileError, match=f"bits are wanted, a u?int.*, not a {np.dtype(dtype).name}"):
            apply(card, getattr(intrinsics, name), np.float32, *[np.ones(1, dtype)] * OF_BITS[name])


# ---- memory and warps --------------------------------------------------------------------------------------

@cuda.jit
def copy_words(to, source, wide):
    i = uint32(cuda.threadIdx.x)
    if wide == uint32(1):
        intrinsics.store_word(to, uint32(i * uint32(4)), intrinsics.load_word(source, uint32(i * uint32(4))))
    elif wide == uint32(2):
        w0, w1 = intrinsics.load_words2(source, uint32(i * uint32(8)))
        intrinsics.store_words2(to, uint32(i * uint32(8)), w0, w1)
    else:
        w0, w1, w2, w3 = intrinsics.load_words4(source, uint32(i * uint32(16)))
        intrinsics.store_words4(to, uint32(i * uint32(16)), w0, w1, w2, w3)


@cuda.jit
def copy_floats(to, source):
    i = uint32(uint32(cuda.threadIdx.x) * uint32(4))
    a, b, c, d = intrinsics.load_floats4(source, i)
    intrinsics.store_floats4(to, i, a, b, c, d)


def test_wide_accesses(card):
    source = np.random.default_rng(11).integers(-128, 128, 40 * 16, np.int8)
    for wide in (1, 2, 4):
        to = card.zeros(len(source), np.int8)
        card.launch(copy_words, 1, 40, to, card.upload(source), wide)
        copied = 40 * 4 * wide
        want = np.r_[source[:copied], np.zeros(len(source) - copied)]
        np.testing.assert_array_equal(card.download(to), want)
    floats = np.arange(160, dtype=np.float32)
    to = card.zeros(160, np.float32)
    card.launch(copy_floats, 1, 40, to, card.upload(floats))
    np.testing.assert_array_equal(card.download(to), floats)


@cuda.jit
def reverse_words(to, source):
    """All words in reverse, by way of the second half of an array in shared memory; 32 threads."""
    i = uint32(cuda.threadIdx.x)
    address = intrinsics.shared_address(cuda.shared.array(256, uint32, alignment=16)) + uint64(512)
    mine = address + uint64(uint32(i << uint32(4)))
    other = address + uint64(uint32(uint32(uint32(31) - i) << uint32(4)))
    w0, w1, w2, w3 = intrinsics.load_words4(source, uint32(i * uint32(4)))
    intrinsics.store_shared4(mine, w0, w1, w2, w3)
    cuda.syncthreads()
    w0, w1, w2, w3 = intrinsics.load_shared4(other)
    first = intrinsics.load_shared(other + uint64(0))
    cuda.syncthreads()
    intrinsics.store_shared(mine + uint64(12), first)
    intrinsics.store_shared(mine, w3)
    last, _, _, also_first = intrinsics.load_shared4(mine)
    intrinsics.store_words4(to, uint32(i * uint32(4)), last, w2, w1, also_first)


def test_shared_memory_by_address(card):
    source = np.arange(128, dtype=np.uint32)
    to = card.zeros(128, np.uint32)
    card.launch(reverse_words, 1, 32, to, card.upload(source))
    np.testing.assert_array_equal(card.download(to), source[::-1])


@cuda.jit
def reduce_warps(sums, maxima, x):
    i = uint32(cuda.threadIdx.x)
    sums[i] = intrinsics.warp_sum(x[i])
    maxima[i] = intrinsics.warp_max(x[i])


def test_warp_reductions(card):
    x = np.random.default_rng(12).standard_normal((3, 32)).astype(np.float32)
    sums, maxima = card.alloc(96, np.float32), card.alloc(96, np.float32)
    card.launch(reduce_warps, 1, 96, sums, maxima, card.upload(x.ravel()))
    tree = x
    for distance in (16, 8, 4, 2, 1):
        tree = tree + tree[:, np.arange(32) ^ distance]
    np.testing.assert_array_equal(card.download(sums).reshape(3, 32), tree)
    want = np.repeat(x.max(1, keepdims=True), 32, 1)
    np.testing.assert_array_equal(card.download(maxima).reshape(3, 32), want)


@cuda.jit
def write_warp_numbers(out):
    thread = uint32(cuda.threadIdx.x)
    out[thread] = intrinsics.uniform(thread >> uint32(5))


def test_what_all_lanes_have_comes_out_of_a_shuffle(card):
    """The emulated card keeps such a number once for all lanes."""
    out = card.alloc(128, np.uint32)
    card.poison(out)
    card.launch(write_warp_numbers, 1, 128, out)
    np.testing.assert_array_equal(card.download(out), np.arange(128) // 32)


@cuda.jit
def read_at(out, q, d, places):
    """out[i] = word i and item i of what lies at a pair of addresses."""
    i = uint32(cuda.threadIdx.x)
    for e in range(uint32(3)):
        words = intrinsics.array_at(places[uint32(2 * e)], q)
        items = intrinsics.array_at(places[uint32(2 * e + 1)], d)
        word, _ = intrinsics.stream_words2(words, uint32(i << uint32(3)))
        out[uint32(e * 32 + i)] = uint32(word + uint32(items[i]))


def test_memory_is_read_by_its_address(card):
    rng = np.random.default_rng(0)
    q, d = rng.integers(-128, 128, (3, 256), np.int8), rng.integers(0, 2**16, (3, 32), np.uint16)
    on_card, order = (card.upload(q), card.upload(d)), [2, 0, 1]
    places = card.upload(np.array([[array[e].ptr for array in on_card] for e in order], np.uint64))
    out = card.alloc(96, np.uint32)
    card.poison(out)
    card.launch(read_at, 1, 32, out, *(array.reshape(-1) for array in on_card), places.reshape(-1))
    want = q.view(np.uint32).reshape(3, 32, 2)[order, :, 0] + d[order]
    np.testing.assert_array_equal(card.download(out), want.ravel())
