"""The small model of the tests; copies of model files with their tensors in another type, and what a model says."""

import itertools

import gguf
import numpy as np

import qengine
from kernels.formats import FLOATS, FORMATS
from models.quantize import quantize, rewrite
from tests.oracle import DATA

TINY = str(DATA / "tiny-Q8_0.gguf")
SLOTS, CONTEXT, CHUNK = 3, 1024, 64


def load_tiny(card, **options):
    """An engine with the small model of random weights that the tests have."""
    return qengine.load(TINY, card=card, progress=False, **{"ctx": CONTEXT, "slots": SLOTS, "chunk": CHUNK} | options)


def as_stored(source):
    """For `rewrite`: the tensors of the file `source` as they are."""
    source = qengine.GGUF(source)

    def convert(tensor, values):
        return values if tensor.type == "F32" else (source.data(tensor.name), gguf.GGMLQuantizationType[tensor.type])

    return convert


def write_as_float32(source, path):
    """The same model with every tensor dequantised."""
    rewrite(source, path, lambda tensor, values: values)


PROMPT = [5, 300, 77, 1024, 9, 2048, 31] * 6


def results(path, card):
    """(logits of PROMPT, float32 [42, n_vocab]; the 6 greedy tokens after it) of a model file."""
    engine = qengine.load(str(path), card=card, ctx=128, progress=False)
    tokens = [delta.token_id for delta in engine.submit(qengine.Request(PROMPT, max_tokens=6, ignore_eos=True))]
    logits = engine.evaluate(PROMPT)
    engine.close()
    return logits, tokens


# ---- stored, simply ------------------------------------------------------------------------------------

def stored(kind, values):
    """float32 [n, k] as `rewrite` takes it in a type of kernels/formats: (uint8 [n, bytes of a row], its number)."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in FORMATS:
        return quantize(kind, values), number
    if kind == "BF16":      # the upper halves: truncation is rounding enough here
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(FLOATS[kind].dtype).view(np.uint8), number


def has_codes(format):
    """Whether each weight has a code of its own."""
    return len(format.values) == 2**format.bits


def as_types(*kinds):
    """For `rewrite`: matrices in these types, one after the other, where their rows are whole blocks of it."""
    turn = itertools.count()

    def convert(tensor, values):
        if tensor.type != "Q8_0":
            return values
        fitting = [kind for kind in kinds if tensor.shape[1] % FORMATS[kind].file_block == 0] or ["Q8_0"]
        kind = fitting[next(turn) % len(fitting)]
        return stored(kind, values)

    return convert
