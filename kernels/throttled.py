"""Replaces instructions that the vendor slowed down on a card, by rewriting compiled kernels.

On later mining cards dp4a (CMP 50HX, 70HX, 90HX, 170HX) or the fused multiply-add of float32 (CMP 170HX) runs at
1/16 of its rate, while the simpler instructions that can stand for it run at full rate. `kernels/probe.py` measures
which instructions are slow. `rewrite` replaces them in the PTX of every kernel for that card, so that no kernel needs a
version of its own. Where nothing is throttled, nothing is rewritten.

    dp4a  ->  dp2a    two of them; the 8-bit numbers of the first operand become 16-bit ones by two prmt
          ->  imad    four multiply-adds; every byte of both operands is extracted with its sign
    ffma  ->  fp32    a multiplication and an addition, each rounded

The dot products stay exact, so with dp2a and imad every bit of every result is the same as with dp4a. A
multiplication and an addition round twice where the fused multiply-add rounds once. Results of such a card are as
accurate (its kernels pass the same checks against float64), but not bit for bit those of other cards: a value halfway
between two int8 may become the other one, so the bitwise check of kernels/quantize.py fails there.

Tensor cores are not replaced: kernels for them are launched only where they are faster (kernels/products.py).

Instructions per 4 products of int8: dp4a 1; dp2a 2, and 2 prmt; imad 4, and 8 extractions. Prmt and extractions run
beside the multiplications, on another pipe (the ALU) of every generation from Volta on.
"""

import re

REGISTER = r"([%$\w]+)"
DOT = re.compile(rf"dp4a\.s32\.s32\s+{REGISTER},\s*{REGISTER},\s*{REGISTER},\s*([-%$\w]+);")
FMA = re.compile(rf"fma\.rn\.f32\s+{REGISTER},\s*([-%$\w]+),\s*([-%$\w]+),\s*([-%$\w]+);")

BLOCKS_PER_SM = re.compile(r"^\.minnctapersm \d+\n", re.M)

# prmt: nibble i of the selector picks byte i of the result; 8 + j repeats the sign of byte j.
SIGNED_PAIRS = "0x9180", "0xB3A2"       # bytes 0 and 1, bytes 2 and 3, as signed 16-bit numbers


def dp2a(found):
    """PTX that computes one dp4a by two dp2a. A dp2a multiplies two 16-bit numbers by two bytes of the second
    operand."""
    to, a, b, c = found.groups()
    low, high = (f"prmt.b32 pairs, {a}, 0, {selector};" for selector in SIGNED_PAIRS)
    return (f"{{ .reg .b32 pairs; .reg .b32 sum; {low} dp2a.lo.s32.s32 sum, pairs, {b}, {c}; "
            f"{high} dp2a.hi.s32.s32 {to}, pairs, {b}, sum; }}")


def imad(found):
    """PTX that computes one dp4a by multiply-adds of the extracted bytes."""
    to, a, b, c = found.groups()
    steps = [f"bfe.s32 one, {a}, {8 * i}, 8; bfe.s32 other, {b}, {8 * i}, 8; "
             f"mad.lo.s32 sum, one, other, {'sum' if i else c};" for i in range(4)]
    return f"{{ .reg .b32 one; .reg .b32 other; .reg .b32 sum; {' '.join(steps)} mov.b32 {to}, sum; }}"


def multiply_add(found):
    """PTX that computes one fused multiply-add by a multiplication and an addition."""
    to, a, b, c = found.groups()
    return f"{{ .reg .f32 product; mul.rn.f32 product, {a}, {b}; add.rn.f32 {to}, product, {c}; }}"


REWRITINGS = {("dp4a", "dp2a"): (DOT, dp2a), ("dp4a", "imad"): (DOT, imad), ("ffma", "fp32"): (FMA, multiply_add)}


def rewrite(ptx, instead):
    """`ptx` with instructions replaced: `instead` holds pairs (throttled, replacement), keys of REWRITINGS."""
    for pair in instead:
        instruction, replacement = REWRITINGS[pair]
        ptx, found = instruction.subn(replacement, ptx)
        if found:                       # the least number of blocks per SM was chosen for the former instructions
            ptx = BLOCKS_PER_SM.sub("", ptx)
    return ptx
