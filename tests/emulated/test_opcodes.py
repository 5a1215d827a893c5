"""Every family of instructions against independent Python oracles, on random and edge values, computed once per warp
(scalars) and once per lane (vectors), with AVX-512 and without."""

import math
from fractions import Fraction

import numpy as np
import pytest

from kernels.emulated import native
from tests.emulated.ptx_runner import SIZE, elementwise, module
from tests.emulated.rounding import rounded

N = 128
FLOAT = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
WAYS = [(True, native.host), *((False, target) for target in native.TARGETS)]
EVERY_WAY = pytest.mark.parametrize("uniform, target", WAYS, ids=lambda value: getattr(value, "__name__", None))


# ---- values ----

def words(kind, seed):
    """N raw values (unsigned) of an integer type: edges first, then random ones of every magnitude."""
    bits = 8 * SIZE[kind]
    random = np.random.default_rng(seed)
    edges = [0, 1, 2, 31, 32, 33, 63, 64, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << bits) - 2]
    edges = [e % (1 << bits) for e in edges]
    random.shuffle(edges)
    values = edges + [int.from_bytes(random.bytes(8), "little") % (1 << bits) >> int(random.integers(bits))
                      for _ in range(N - len(edges))]
    return np.array(values, f"u{SIZE[kind]}")


def floats(kind, seed, special=True):
    """N floats: random signs, exponents and mantissas, and edge values."""
    random = np.random.default_rng(seed)
    spread = {"f16": 8, "f32": 30, "f64": 100}[kind]
    values = (random.standard_normal(N) * 2.0 ** random.integers(-spread, spread, N)).astype(FLOAT[kind])
    tiny = np.finfo(FLOAT[kind]).smallest_subnormal
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, tiny, -tiny, np.finfo(FLOAT[kind]).max]
    if special:
        edges += [np.inf, -np.inf, np.nan]
    at = random.permutation(N)[:len(edges)]
    values[at] = edges
    return values


def signed(value, bits):
    return value - (1 << bits) if value >> (bits - 1) else value


def run(line, kinds, result, inputs, uniform, target):
    return elementwise(line, kinds, result, inputs, uniform, target())


# ---- integers: (line, types, result, oracle on Python ints that are signed for s types) ----

def clamp(x, kind):
    bits = 8 * SIZE[kind]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return min(max(x, low), high)


def quotient(a, b):
    return -1 if b == 0 else int(Fraction(a, b))


def remainder(a, b):
    return a if b == 0 else a - b * int(Fraction(a, b))


def bfe(a, start, length, bits, is_signed):
    start, length = start & 255, length & 255
    raw = a % (1 << bits)
    top = raw >> min(start + length - 1, bits - 1) & 1 if length and is_signed else 0
    return sum((raw >> start + i & 1 if start + i < bits and i < length else top) << i for i in range(bits))


def bfi(a, b, start, length, bits=32):
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < bits:
            b = b & ~(1 << start + i) | (a >> i & 1) << start + i
    return b


def prmt(a, b, selector):
    source = [x >> 8 * i & 255 for x in (a, b) for i in range(4)]
    picks = [(source[selector >> 4 * i & 7], selector >> 4 * i & 8) for i in range(4)]
    return sum(((255 if byte >> 7 else 0) if sign else byte) << 8 * i for i, (byte, sign) in enumerate(picks))


def fields(word, bits, is_signed):
    parts = [word >> i & (1 << bits) - 1 for i in range(0, 32, bits)]
    return [signed(p, bits) for p in parts] if is_signed else parts


def dp4a(a, b, c, sa, sb):
    return c + sum(x * y for x, y in zip(fields(a, 8, sa), fields(b, 8, sb)))


def dp2a(a, b, c, sa, sb, high):
    return c + sum(x * y for x, y in zip(fields(a, 16, sa), fields(b, 8, sb)[2 * high:]))


def shf(low, high, n, left, wrap):
    n = n & 31 if wrap else min(n, 32)
    both = high << 32 | low
    return both << n >> 32 if left else both >> n


def bfind(a, kind, shift):
    bits = 8 * SIZE[kind]
    a = ~a if a < 0 else a
    return -1 if a == 0 else bits - a.bit_length() if shift else a.bit_length() - 1


def count_leading(a, bits):
    return bits - a.bit_length()


def integer_cases():
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        two = (kind, kind)
        bits = 8 * SIZE[kind]
        yield f"add.{kind}", two, kind, lambda a, b: a + b
        yield f"sub.{kind}", two, kind, lambda a, b: a - b
        yield f"mul.lo.{kind}", two, kind, lambda a, b: a * b
        yield f"mul.hi.{kind}", two, kind, lambda a, b, bits=bits: a * b >> bits
        yield f"mad.lo.{kind}", (kind,) * 3, kind, lambda a, b, c: a * b + c
        yield f"div.{kind}", two, kind, quotient
        yield f"rem.{kind}", two, kind, remainder
        yield f"min.{kind}", two, kind, min
        yield f"max.{kind}", two, kind, max
        yield f"sad.{kind}", (kind,) * 3, kind, lambda a, b, c: abs(a - b) + c
        yield f"shr.{kind}", (kind, "u32"), kind, lambda a, n: a >> n if n < 200 else -1 if a < 0 else 0
        if kind[0] == "s":
            yield f"neg.{kind}", (kind,), kind, lambda a: -a
            yield f"abs.{kind}", (kind,), kind, abs
        if bits < 64:
            wide = kind[0] + str(2 * bits)
            yield f"mul.wide.{kind}", two, wide, lambda a, b: a * b
            yield f"mad.wide.{kind}", (kind, kind, wide), wide, lambda a, b, c: a * b + c
    yield "add.sat.s32", ("s32", "s32"), "s32", lambda a, b: clamp(a + b, "s32")
    yield "sub.sat.s32", ("s32", "s32"), "s32", lambda a, b: clamp(a - b, "s32")
    for kind in ("b16", "b32", "b64"):
        bits = 8 * SIZE[kind]
        yield f"and.{kind}", (kind, kind), kind, int.__and__
        yield f"or.{kind}", (kind, kind), kind, int.__or__
        yield f"xor.{kind}", (kind, kind), kind, int.__xor__
        yield f"not.{kind}", (kind,), kind, lambda a: ~a
        yield f"cnot.{kind}", (kind,), kind, lambda a: int(a == 0)
        yield f"shl.{kind}", (kind, "u32"), kind, lambda a, n: a << n if n < 64 else 0
    for kind in ("b32", "b64"):
        bits = 8 * SIZE[kind]
        yield f"popc.{kind}", (kind,), "u32", int.bit_count
        yield f"clz.{kind}", (kind,), "u32", lambda a, bits=bits: count_leading(a, bits)
        yield f"brev.{kind}", (kind,), kind, lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2)
    for kind in ("u32", "s32", "u64", "s64"):
        bits, is_signed = 8 * SIZE[kind], kind[0] == "s"
        yield f"bfe.{kind}", (kind, "u32", "u32"), kind, lambda a, s, n, b=bits, i=is_signed: bfe(a, s, n, b, i)
        yield f"bfind.{kind}", (kind,), "u32", lambda a, k=kind: bfind(a, k, False)
        yield f"bfind.shiftamt.{kind}", (kind,), "u32", lambda a, k=kind: bfind(a, k, True)
    yield "bfi.b32", ("b32", "b32", "u32", "u32"), "b32", bfi
    yield "bfi.b64", ("b64", "b64", "u32", "u32"), "b64", lambda a, b, s, n: bfi(a, b, s, n, 64)
    yield "prmt.b32", ("b32", "b32", "b32"), "b32", prmt
    for left in (True, False):
        for wrap in (True, False):
            yield (f"shf.{'l' if left else 'r'}.{'wrap' if wrap else 'clamp'}.b32", ("b32", "b32", "u32"), "b32",
                   lambda a, b, n, left=left, wrap=wrap: shf(a, b, n, left, wrap))
    for sa in (True, False):
        for sb in (True, False):
            kinds = f"{'s' if sa else 'u'}32.{'s' if sb else 'u'}32"
            yield f"dp4a.{kinds}", ("b32",) * 3, "b32", lambda a, b, c, sa=sa, sb=sb: dp4a(a, b, c, sa, sb)
            for high in (0, 1):
                yield (f"dp2a.{'hi' if high else 'lo'}.{kinds}", ("b32",) * 3, "b32",
                       lambda a, b, c, sa=sa, sb=sb, high=high: dp2a(a, b, c, sa, sb, high))
    for to in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        for of in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
            if SIZE[to] > 1 and SIZE[of] > 1:
                yield f"cvt.{to}.{of}", (of,), to, lambda a: a
                yield f"cvt.sat.{to}.{of}", (of,), to, lambda a, to=to: clamp(a, to)
    yield "selp.b32 %out, %in0, %in1, %p1;", ("u32", "u32"), "u32", lambda a, b: a if a < b else b


@EVERY_WAY
@pytest.mark.parametrize("line, kinds, result, oracle", [pytest.param(*c, id=c[0]) for c in integer_cases()])
def test_integers(line, kinds, result, oracle, uniform, target):
    inputs = [words(k, 7 * i + len(line)) for i, k in enumerate(kinds)]
    if "%" not in line:
        line = f"{line} %out, {', '.join(f'%in{i}' for i in range(len(kinds)))};"
    out = run("setp.lt.u32 %p1, %in0, %in1;\n" * ("%p1" in line) + line, kinds, result, inputs, uniform, target)
    bits = 8 * SIZE[result]
    for i, got in enumerate(out):
        args = [int(x[i]) if k[0] != "s" else signed(int(x[i]), 8 * SIZE[k]) for x, k in zip(inputs, kinds)]
        assert int(got) == oracle(*args) % (1 << bits), f"{line} of {args}"


# ---- floats ----

def same(got, expected, kind):
    """Equal numbers (signs of zero too); any NaN for a NaN."""
    got, expected = got.view(FLOAT[kind]), np.asarray(expected, FLOAT[kind])
    both = np.isnan(got) & np.isnan(expected)
    bits = f"u{SIZE[kind]}"
    wrong = ~both & (got.view(bits) != expected.view(bits))
    assert not wrong.any(), [(i, got[i], expected[i]) for i in np.flatnonzero(wrong)[:5]]


def exact(operation, kind, mode, values):
    """One correctly rounded operation on finite floats; with IEEE's special values by way of NumPy."""
    with np.errstate(all="ignore"):
        plain = FLOAT[kind](operation(*(np.float64(v) for v in values)))
    if not np.isfinite([float(v) for v in values]).all():
        return plain
    value = operation(*(Fraction(float(v)) for v in values))
    return plain if value == 0 else FLOAT[kind](rounded(value, kind, mode))


@EVERY_WAY
@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
@pytest.mark.parametrize("name, operation, n", [("add", lambda a, b: a + b, 2), ("sub", lambda a, b: a - b, 2),
                                                ("mul", lambda a, b: a * b, 2), ("fma", lambda a, b, c: a * b + c, 3)])
def test_float_arithmetic(name, operation, n, kind, uniform, target):
    inputs = [floats(kind, 11 * i + len(name)) for i in range(n)]
    line = f"{name}.rn.{kind} %out, {', '.join(f'%in{i}' for i in range(n))};"
    out = run(line, (kind,) * n, kind, inputs, uniform, target)
    same(out, [exact(operation, kind, "rn", v) for v in zip(*inputs)], kind)


def root(x):
    """The square root, far beyond the precision of a float; its last bit set where it is not exact."""
    scale = 1 << 1200
    whole = math.isqrt(x.numerator * scale * scale // x.denominator)
    exact_root = Fraction(whole, scale) ** 2 == x
    return Fraction(2 * whole + (not exact_root), 2 * scale)


DIRECTED = {"add": (lambda a, b: a + b, 2), "sub": (lambda a, b: a - b, 2), "mul": (lambda a, b: a * b, 2),
            "div": (lambda a, b: a / b, 2), "fma": (lambda a, b, c: a * b + c, 3), "rcp": (lambda a: 1 / a, 1),
            "sqrt": (root, 1)}


@EVERY_WAY
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", DIRECTED)
def test_directed_rounding(name, kind, mode, uniform, target):
    """Numbers near each other, so that sums cancel, and of all magnitudes, so that results overflow or are denormal."""
    operation, n = DIRECTED[name]
    random = np.random.default_rng(n)
    near = [random.standard_normal(N // 2) * 2.0 ** random.integers(-4, 4, N // 2) for _ in range(n)]
    reach = {"f32": 120, "f64": 1000}[kind]
    far = [random.standard_normal(N // 2) * 2.0 ** random.integers(-reach, reach, N // 2) for _ in range(n)]
    inputs = [np.concatenate(pair).astype(FLOAT[kind]) for pair in zip(near, far)]
    if name == "sqrt":
        inputs = [abs(x) for x in inputs]
    if name in ("add", "sub"):
        inputs[1][:4] = inputs[0][:4] * (-1 if name == "add" else 1)
    line = f"{name}.{mode}.{kind} %out, {', '.join(f'%in{i}' for i in range(n))};"
    out = run(line, (kind,) * n, kind, inputs, uniform, target)
    zero = -0.0 if mode == "rm" else 0.0            # of a number and its opposite
    values = [operation(*(Fraction(float(x)) for x in numbers)) for numbers in zip(*inputs)]
    same(out, [rounded(value, kind, mode) if value else zero for value in values], kind)


@EVERY_WAY
def test_half2_fma_rounds_once(uniform, target):
    halves = [np.random.default_rng(i).permutation(np.concatenate([floats("f16", 5 * i + j, False) for j in (0, 1)]))
              for i in range(3)]
    less, more = 1 - 2.0**-10, 1 + 2.0**-10         # their product is 1 - 2**-20
    special = [(1, 1, -1), (-1, 1, 1), (2.0**-11 * less, more, more), (-2.0**-11 * less, more, -more),
               (2.0**-11, 1, more), (2.0**-24, 0.5, 0), (2.0**-24, 0.5, 2.0**-24), (less, 2.0**-25, 2.0**-24)]
    for half, values in zip(halves, zip(*special)):
        half[:len(special)] = values
    out = run("fma.rn.f16x2 %out, %in0, %in1, %in2;", ("f16x2",) * 3, "f16x2", [h.view(np.uint32) for h in halves],
              uniform, target)
    expected = [exact(lambda a, b, c: a * b + c, "f16", "rn", v) for v in zip(*halves)]
    same(out.view(np.uint16), expected, "f16")


@EVERY_WAY
@pytest.mark.parametrize("line, kind, oracle", [
    ("div.rn.f32 %out, %in0, %in1;", "f32", lambda a, b: a / b),
    ("div.rn.f64 %out, %in0, %in1;", "f64", lambda a, b: a / b),
    ("sqrt.rn.f32 %out, %in0;", "f32", lambda a, b: np.sqrt(a)),
    ("sqrt.rn.f64 %out, %in0;", "f64", lambda a, b: np.sqrt(a)),
    ("rcp.rn.f32 %out, %in0;", "f32", lambda a, b: np.float32(1) / a),
    ("rcp.rn.f64 %out, %in0;", "f64", lambda a, b: 1 / a),
    ("neg.f32 %out, %in0;", "f32", lambda a, b: -a),
    ("abs.f32 %out, %in0;", "f32", lambda a, b: abs(a)),
    ("neg.f16 %out, %in0;", "f16", lambda a, b: -a),
    ("min.f32 %out, %in0, %in1;", "f32", lambda a, b: np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))),
    ("max.f32 %out, %in0, %in1;", "f32", lambda a, b: np.where(a == b, np.where(np.signbit(a), b, a), np.fmax(a, b))),
    ("min.f64 %out, %in0, %in1;", "f64", lambda a, b: np.where(a == b, np.where(np.signbit(a), a, b), np.fmin(a, b))),
    ("copysign.f32 %out, %in0, %in1;", "f32", lambda a, b: np.copysign(b, a)),
    ("cvt.rni.f32.f32 %out, %in0;", "f32", lambda a, b: np.rint(a)),
    ("cvt.rmi.f32.f32 %out, %in0;", "f32", lambda a, b: np.floor(a)),
    ("cvt.rpi.f32.f32 %out, %in0;", "f32", lambda a, b: np.ceil(a)),
    ("cvt.rzi.f32.f32 %out, %in0;", "f32", lambda a, b: np.trunc(a)),
    ("cvt.sat.f32.f32 %out, %in0;", "f32", lambda a, b: np.where(a > 0, np.minimum(a, np.float32(1)), np.float32(0))),
])
def test_float_functions(line, kind, oracle, uniform, target):
    a, b = floats(kind, 1), floats(kind, 2)
    with np.errstate(all="ignore"):
        same(run(line, (kind, kind), kind, (a, b), uniform, target), oracle(a, b), kind)


@EVERY_WAY
@pytest.mark.parametrize("line, oracle, low, high", [
    ("ex2.approx.f32", np.exp2, -120, 120), ("lg2.approx.f32", np.log2, 0.001, 1e6), ("sin.approx.f32", np.sin, -3, 3),
    ("cos.approx.f32", np.cos, -3, 3), ("tanh.approx.f32", np.tanh, -5, 5),
    ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 0.001, 1e6), ("rcp.approx.f32", lambda x: 1 / x, 0.001, 1e6),
    ("sqrt.approx.f32", np.sqrt, 0, 1e6)])
def test_approximations(line, oracle, low, high, uniform, target):
    x = np.random.default_rng(3).uniform(low, high, N).astype(np.float32)
    out = run(f"{line} %out, %in0;", ("f32",), "f32", (x,), uniform, target).view(np.float32)
    np.testing.assert_allclose(out, oracle(x.astype(np.float64)), rtol=3e-7, atol=1e-7)


# ---- conversions with floats ----

@EVERY_WAY
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("of", ["f16", "f32", "f64"])
def test_float_to_integer(of, to, mode, uniform, target):
    x = floats(of, 4)
    with np.errstate(over="ignore"):                # in halves the large ones are infinite
        x[-12:] = np.array([2**31, 2**31 - 128, -2**31, -2**31 - 256, 2**32, 2**32 - 256, 32767.5, 32768, -32768.5,
                            -32769, 65535.5, -0.5]).astype(FLOAT[of])
    out = run(f"cvt.{mode}.{to}.{of} %out, %in0;", (of,), to, (x,), uniform, target)
    whole = {"rni": round, "rzi": int, "rmi": lambda f: f.__floor__(), "rpi": lambda f: f.__ceil__()}[mode]
    for value, got in zip(x, out):
        if np.isnan(value):
            expected = 1 << 8 * SIZE[to] - 1 if of == "f64" or "64" in to else 0
        elif np.isinf(value):
            expected = clamp((1 << 70) * (1 if value > 0 else -1), to)
        else:
            expected = clamp(whole(Fraction(float(value))), to)
        assert int(got) == expected % (1 << 8 * SIZE[to]), value


@EVERY_WAY
@pytest.mark.parametrize("of", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["f16", "f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_integer_to_float(of, to, mode, uniform, target):
    x = words(of, 5)
    out = run(f"cvt.{mode}.{to}.{of} %out, %in0;", (of,), to, (x,), uniform, target)
    values = [signed(int(v), 8 * SIZE[of]) if of[0] == "s" else int(v) for v in x]
    same(out, [rounded(Fraction(v), to, mode) for v in values], to)


@EVERY_WAY
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to, of", [("f16", "f32"), ("f16", "f64"), ("f32", "f64")])
def test_float_to_smaller_float(to, of, mode, uniform, target):
    """Among the numbers are many that lie at or next to the middle between two smaller floats."""
    random = np.random.default_rng(8)
    middle = (random.standard_normal(N // 2).astype(FLOAT[to]) * FLOAT[to](0.01)).astype(FLOAT[of])
    middle += np.spacing(middle.astype(FLOAT[to])).astype(FLOAT[of]) / 2
    middle *= 1 + random.integers(-1, 2, N // 2) * np.finfo(FLOAT[of]).eps
    x = np.concatenate([floats(of, 6)[:N // 2], middle.astype(FLOAT[of])])
    out = run(f"cvt.{mode}.{to}.{of} %out, %in0;", (of,), to, (x,), uniform, target)
    expected = [rounded(Fraction(float(v)), to, mode) if np.isfinite(v) and v else float(v) for v in x]
    same(out, [np.copysign(e, v) for e, v in zip(expected, x)], to)


@EVERY_WAY
@pytest.mark.parametrize("to, of", [("f32", "f16"), ("f64", "f16"), ("f64", "f32")])
def test_float_to_larger_float(to, of, uniform, target):
    x = floats(of, 6)
    same(run(f"cvt.{to}.{of} %out, %in0;", (of,), to, (x,), uniform, target), x.astype(FLOAT[to]), to)


# ---- comparisons ----

COMPARISONS = {"eq": lambda a, b: a == b, "ne": lambda a, b: (a < b) | (a > b), "lt": lambda a, b: a < b,
               "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}


@EVERY_WAY
@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64", "f16", "f32", "f64"])
def test_comparisons(kind, uniform, target):
    floating = kind[0] == "f"
    make = floats if floating else words
    a, b = make(kind, 8), make(kind, 9)
    b[::3] = a[::3]
    x, y = (v if floating else v.view(np.dtype(f"{'i' if kind[0] == 's' else 'u'}{SIZE[kind]}")) for v in (a, b))
    nan = np.isnan(x) | np.isnan(y) if floating else np.zeros(N, bool)
    lines, expected, bit = ["mov.u32 %out, 0;"], np.zeros(N, np.uint32), 0
    cases = [(name, compare(x, y)) for name, compare in COMPARISONS.items()]
    if floating:
        cases += [(name + "u", result | nan) for name, result in cases] + [("num", ~nan), ("nan", nan)]
    if kind[0] == "u":
        cases += [(name, COMPARISONS[to](x, y))
                  for name, to in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge"))]
    for name, result in cases:
        lines.append(f"setp.{name}.{kind} %p0, %in0, %in1; selp.b32 %r9, {1 << bit}, 0, %p0; or.b32 %out, %out, %r9;")
        expected |= result.astype(np.uint32) << np.uint32(bit)
        bit += 1
    out = run("\n".join(lines), (kind, kind), "u32", (a, b), uniform, target)
    assert (out == expected).all(), [f"{o:b} {e:b}" for o, e in zip(out, expected) if o != e][:4]


@EVERY_WAY
def test_combined_predicates(uniform, target):
    a, b = words("u32", 1), words("u32", 2)
    lines = """setp.lt.u32 %p0|%p1, %in0, %in1; setp.gt.and.u32 %p2|%p3, %in0, 100, %p0;
    setp.eq.xor.u32 %p4, %in1, 31, %p1;
    selp.b32 %out, 1, 0, %p2; selp.b32 %r9, 2, 0, %p3; or.b32 %out, %out, %r9; selp.b32 %r9, 4, 0, %p4;
    or.b32 %out, %out, %r9;
    and.pred %p5, %p2, %p4; not.pred %p6, %p5; selp.b32 %r9, 8, 0, %p6; or.b32 %out, %out, %r9;"""
    p0, p1 = a < b, a >= b
    p2, p3, p4 = (a > 100) & p0, ~(a > 100) & p0, (b == 31) ^ p1
    expected = p2 * 1 + p3 * 2 + p4 * 4 + ~(p2 & p4) * 8
    assert (run(lines, ("u32", "u32"), "u32", (a, b), uniform, target) == expected).all()


@EVERY_WAY
def test_set_and_lop3_and_packs(uniform, target):
    a, b = words("b32", 3), words("b32", 4)
    lines = """set.lt.u32.s32 %r3, %in0, %in1; lop3.b32 %r4, %in0, %in1, %r3, 0x96; mov.b32 {%h1, %h2}, %r4;
    mov.b32 %r5, {%h2, %h1}; mov.b64 %rd20, {%r5, %in0}; mov.b64 {%r6, %r7}, %rd20; xor.b32 %out, %r6, %r7;"""
    flag = np.where(a.view(np.int32) < b.view(np.int32), np.uint32(0xFFFFFFFF), np.uint32(0))
    mixed = a ^ b ^ flag
    expected = (mixed >> np.uint32(16) | mixed << np.uint32(16)) ^ a
    assert (run(lines, ("b32", "b32"), "b32", (a, b), uniform, target) == expected).all()


# ---- NaN ----

SUM_FROM_LOADED = """mov.b32 %r11, %in1; mov.u32 %r9, 0; AGAIN: mov.b32 %f1, %r11; sub.rn.f32 %f2, %in0, %in0;
add.rn.f32 %f3, %f1, %f2; mov.b32 %r11, %f3; add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 3; @%p1 bra AGAIN;"""
TWO_HALVES = "mov.u32 %r11, 0x7C003C00; mul.rn.f16x2 %r12, %r11, 0; mov.b32 {%h1, %h2}, %r12;"


@EVERY_WAY
@pytest.mark.parametrize("lines, result, expected", [
    ("sub.rn.f32 %f1, %in0, %in0; mov.b32 %out, %f1;", "u32", 0x7FFFFFFF),
    ("mul.rn.f32 %out, %in0, 0f00000000;", "f32", 0x7FFFFFFF),
    ("add.rn.f32 %out, %in1, 0f3F800000;", "f32", 0x7FFFFFFF),
    ("mov.f32 %out, %in1;", "f32", 0xFFC01234), ("mov.b32 %out, %in1;", "u32", 0xFFC01234),
    ("sub.rn.f32 %f1, %in0, %in0; neg.f32 %f1, %f1; setp.nan.f32 %p1, %f1, %f1; selp.f32 %out, %f1, %in0, %p1;", "f32",
     0x7FFFFFFF),
    ("sub.rn.f32 %f1, %in0, %in0; setp.nan.f32 %p1, %f1, %f1; selp.f32 %out, %in1, %f1, %p1;", "f32", 0xFFC01234),
    ("sub.rn.f32 %f1, %in0, %in0; copysign.f32 %out, %f1, %in0;", "f32", 0x7F800000),
    ("min.f32 %out, %in1, %in1;", "f32", 0x7FFFFFFF),
    ("sub.rn.f32 %f1, %in0, %in0; mov.u32 %r9, 0; AGAIN: add.rn.f32 %f1, %f1, %f1; add.u32 %r9, %r9, 1; "
     "mov.f32 %f2, %f1;"
     "setp.lt.u32 %p1, %r9, 3; @%p1 bra AGAIN; mov.b32 %out, %f2;", "u32", 0x7FFFFFFF),
    ("sub.rn.f32 %f1, %in0, %in0; mov.b32 %r1, %f1; shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1; mov.b32 %f2, %r2;"
     "add.rn.f32 %f3, %f1, %f2; mov.b32 %r3, %f3; xor.b32 %r2, %r2, %r3; add.u32 %out, %r2, 1;", "u32", 1),
    ("mov.b32 %r1, %in1; shfl.sync.bfly.b32 %out, %r1, 1, 31, -1;", "u32", 0xFFC01234),
    ("cvt.rn.f16.f32 %out, %in1;", "f16", 0x7FFF),
    ("cvt.rn.f16.f32 %h1, %in0; sub.rn.f16 %out, %h1, %h1;", "f16", 0x7FFF),
    ("cvt.rn.f16.f32 %h1, %in0; sub.rn.f16 %h2, %h1, %h1; cvt.f32.f16 %out, %h2;", "f32", 0x7FFFFFFF),
    ("mov.u32 %r1, 0x7C003C00; mul.rn.f16x2 %out, %r1, 0;", "u32", 0x7FFF0000),
    ("mov.u32 %r1, 0xFE013C00; max.f16x2 %out, %r1, %r1;", "u32", 0x7FFF3C00),
    (f"{SUM_FROM_LOADED} mov.b32 %out, %r11;", "u32", 0x7FFFFFFF),
    (f"{SUM_FROM_LOADED} mov.b32 %f4, %r11; mul.rn.f32 %out, %f4, 0f3F800000;", "f32", 0x7FFFFFFF),
    ("mov.b32 %r1, %in1; mov.u32 %r9, 0; setp.eq.u32 %p1, %r9, 0; @%p1 bra KEEP; sub.rn.f32 %f1, %in0, %in0;"
     "mov.b32 %r1, %f1; KEEP: mov.b32 %out, %r1;", "u32", 0xFFC01234),
    (f"{TWO_HALVES} cvt.f32.f16 %f1, %h1; cvt.f32.f16 %f2, %h2; add.rn.f32 %out, %f1, %f2;", "f32", 0x7FFFFFFF),
    (f"{TWO_HALVES} mov.b32 %out, {{%h2, %h2}};", "u32", 0x7FFF7FFF),
    (f"{TWO_HALVES} cvt.f32.f16 %f1, %h1; mov.b32 %out, {{%h1, %h2}};", "u32", 0x7FFF0000)])
def test_the_nan_of_the_card(lines, result, expected, uniform, target):
    inputs = [np.full(32, bits, np.uint32) for bits in (0x7F800000, 0xFFC01234)]
    out = run(lines, ("f32", "f32"), result, inputs, uniform, target)
    assert (out == expected).all(), hex(out[0])


@pytest.mark.parametrize("reading, shows", [("mul.rn.f32 %f4, %f2, %f2;", False), ("mov.f32 %f4, %f2;", True)])
def test_a_sum_that_only_arithmetic_reads_is_not_corrected(reading, shows):
    """In a loop, where a correction would cost time each round. The sum's register also holds what was loaded."""
    body = f"""ld.param.u64 %rd1, [p0]; ld.global.v2.u32 {{%r1, %r2}}, [%rd1]; mov.u32 %r9, 0;
    AGAIN: mov.b32 %f1, %r1; add.rn.f32 %f3, %f1, %f1; mov.b32 %r1, %f3; add.u32 %r9, %r9, 1;
    setp.lt.u32 %p1, %r9, 3; @%p1 bra AGAIN;
    mov.b32 %f2, %r1; {reading} st.global.f32 [%rd1], %f4;"""
    loop = native.translate(module(body, ["u64"]), (32, 1, 1), native.host()).ir.partition("\nb1:")[2]
    assert (f"{0x7FFFFFFF}" in loop.partition("\nb2:")[0]) == shows
