"""Types of weights: how a GGUF file stores them, how they lie on a card, how a lane turns them into dp4a words.

A quantised weight is  scale * q - minimum  with a small integer q. What is stored of q is its *code* of a few bits. A
*block* is 32 consecutive weights of a row; d, dmin and m are float16 of the file's block, s an integer.

    format  bits  q              scale               minimum     file: bytes of weights   bytes of 32 weights on a card
    Q8_0    8     signed         d                   -                  34 of 32               34
    Q4_0    4     signed         d                   -                  18 of 32               18
    Q5_0    5     signed         d                   -                  22 of 32               22
    Q4_1    4     0 .. 15        d                   -m                 20 of 32               20
    Q5_1    5     0 .. 31        d                   -m                 24 of 32               24
    Q4_K    4     0 .. 15        d s                 dmin s'           144 of 256              18
    Q5_K    5     0 .. 31        d s                 dmin s'           176 of 256              22
    Q6_K    6     signed         d s for each half   -                 210 of 256              26.25
    Q3_K    3     -4 .. 3        d s for each half   -                 110 of 256              14.25
    Q2_K    2     0 .. 3         d s for each half   dmin s', each half 84 of 256              10.5
    IQ4_NL  4     table of 16    d                   -                  18 of 32               18
    IQ4_XS  4     table of 16    d s                 -                 136 of 256              17.25
    MXFP4   4     table of 16    2**(e - 128)        -                  17 of 32               18
    NVFP4   4     table of 16    of each half        -                  36 of 64               18
    TQ1_0   1.69  -1 .. 1        d                   -                  54 of 256               8.25
    TQ2_0   2     -1 .. 2        d                   -                  66 of 256               8.25
    IQ3_S   3.25  book           d s                 -                 110 of 256              14.25
    IQ3_XXS 3     book           d s                 -                  98 of 256              12.25
    IQ2_S   2.25  book           d s for each half   -                  82 of 256              10.25
    IQ2_XS  2.13  book           d s for each half   -                  74 of 256               9.25
    IQ2_XXS 2     book           d s                 -                  66 of 256               8.25
    IQ1_M   1.63  book           d s for each half   -                  56 of 256               7.25
    IQ1_S   1.5   book           d s                 -                  50 of 256               6.25

A block adds this to a product with int8 activations xq of scale xd (kernels/quantize.py), in all kernels:

    dot    = sum of q * xq over the block, exact
             Where halves have an s each: sum of s * q * xq, exact
    acc    = fma(float(dot), ws * xd, acc)           ws = d, d * s or, where halves have an s each, d
             NVFP4: such a step for the first half of the block, then for the second; ws = the half's scale times
             the factor of the row, which is 1 unless the file has one
    acc    = fma(-minimum, xd * float(sum of xq), acc)      where there is a minimum; of Q2_K for each half

Pipe: none; the bus that brings the file is the bound. Layout of the file: github.com/ggml-org/ggml, src/ggml-quants.c.

    floats.py                                         weights that are stored as floats
    format.py                                         what all formats share: planes, repacking, references
    codes.py                                          codes of 2 to 8 bits in planes
    legacy.py  k_quants.py  tables.py  ternary.py     the families
    code_books.py                                     codes of groups of weights
    checks.py                                         check and time
"""

from kernels.formats import code_books, k_quants, legacy, tables, ternary
from kernels.formats.floats import FLOATS, Float
from kernels.formats.format import (BLOCK, Format, as_words, dequantize, factors, on_card, pack, pack_scales,
                                    product_reference, random_raw, repack, scale_rows, split)

__all__ = ["BLOCK", "FLOATS", "FORMATS", "GGML_TYPES", "OTHER_TYPES", "Float", "Format", "as_words", "dequantize",
           "factors", "on_card", "pack", "pack_scales", "product_reference", "random_raw", "repack", "scale_rows",
           "split"]

FORMATS = {format.name: format for format in (
    legacy.Q8_0, legacy.Q4_0, tables.IQ4_NL, legacy.Q5_0, k_quants.Q4_K, k_quants.Q5_K, k_quants.Q6_K,
    legacy.Q4_1, legacy.Q5_1, k_quants.Q2_K, k_quants.Q3_K, tables.IQ4_XS, tables.MXFP4, tables.NVFP4,
    ternary.TQ1_0, ternary.TQ2_0, *code_books.CODE_BOOKS,
)}

# The other types of GGML, number -> (name, weights per block, bytes per block). The engine does not run them, but it
# refuses a file that has one by the type's name. A type that becomes a Format leaves this list. Of these, published
# files have only Q1_0: those of Bonsai, which was trained with weights of d and -d
# (github.com/ggml-org/llama.cpp/pull/21273).
OTHER_TYPES = {
    9: ("Q8_1", 32, 40), 15: ("Q8_K", 256, 292), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 41: ("Q1_0", 128, 18),
}
GGML_TYPES = {type.number: (type.name, type.file_block, type.file_bytes)
              for type in (*FLOATS.values(), *FORMATS.values())} | OTHER_TYPES
