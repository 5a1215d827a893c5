"""Exact rounding with fractions: the oracle of the floating-point opcodes."""

import math
from fractions import Fraction

FORMATS = {"f16": (11, -14, 15), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}


def rounded(value, kind, mode="rn"):
    """The Fraction `value` as a Python float that is a number of the format, by mode rn, rz, rm or rp."""
    digits, e_min, e_max = FORMATS[kind]
    if value == 0:
        return 0.0
    sign = 1 if value > 0 else -1
    exponent = max(_exponent(abs(value)), e_min)
    unit = Fraction(2) ** (exponent - digits + 1)
    steps = value / unit
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](steps)
    result = whole * unit
    if abs(result) >= Fraction(2) ** (e_max + 1):
        towards_zero = mode == "rz" or mode == "rm" and value > 0 or mode == "rp" and value < 0
        largest = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** e_max
        return sign * (float(largest) if towards_zero else math.inf)
    return sign * float(abs(result))


def _exponent(value):
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if value >= Fraction(2) ** e else e - 1
