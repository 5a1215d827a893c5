"""Numba's compiler, with less work done twice: kernels compile sooner, to the same PTX (benchmarks/results.md).

Numba asks itself the same questions thousands of times for each kernel. Inside `quickly()` these are answered at
once; everything else is Numba's own code:

    question                                       what takes Numba long
    which options hold?                            a dozen getters in Python, each time that a type is looked up
    what does `a + b` of these types return?       all kinds of addition are tried in turn, at each addition
    which variables live at the start of a block?  found after each pass, though generators alone want to know
    how many bytes does a value take?              LLVM reads a module that it writes for this question
    what is the hash of an entry in a line table?  the entry, its function and all types are gone through

The answers depend on their questions alone, so they hold for other threads and for later kernels, too.
"""

from contextlib import contextmanager

from llvmlite.ir.types import Type
from llvmlite.ir.values import DIValue
from numba.core.types.functions import BaseFunction
from numba.cuda.core import postproc, transforms
from numba.cuda.core.targetconfig import ConfigStack, TargetConfig
from numba.cuda.target import CUDATypingContext

_defaults = {}                                  # class of options -> name -> value
_signatures = {}                                # (function, ..., types of arguments, options) -> signature of the call
_sizes = {}                                     # (type in LLVM's words, layout of the target) -> bytes
MOST_SIGNATURES = 100_000                       # kept at most: each literal of a new kernel adds one


def _values(options):
    """Names and values of all options: those that are set, before the defaults of their class."""
    kind = type(options)
    if kind not in _defaults:
        _defaults[kind] = {name: option.default for name, option in kind.options.items()}
    return _defaults[kind] | options._values


def _call_type(function, context, args, kws, find=BaseFunction.get_call_type):
    """The signature of a call of one of Numba's own functions. A call that no version of it takes is asked anew, and so
    is one in code for the CPU, which a user's thread may compile meanwhile: its options are kept elsewhere."""
    if not isinstance(context, CUDATypingContext):
        return find(function, context, args, kws)
    place = function, context, tuple(args), tuple(kws.items()), ConfigStack.top_or_none()
    if place in _signatures:
        return _signatures[place]
    if len(_signatures) >= MOST_SIGNATURES:
        _signatures.clear()
    found = _signatures[place] = find(function, context, args, kws)
    return found


def _post_process(processor, emit_dels=False, extend_lifetimes=False, run=postproc.PostProcessor.run):
    """What follows a pass, without looking for variables that live where blocks start."""
    function = processor.func_ir
    if function.is_generator:
        run(processor, emit_dels, extend_lifetimes)
        return
    function.blocks = transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)
    function.generator_info = None
    if emit_dels:
        processor._insert_var_dels(extend_lifetimes=extend_lifetimes)


def _abi_size(kind, target_data, context=None, find=Type.get_abi_size):
    """The bytes of a type. Where it names other types (%), these may change."""
    text = str(kind)
    if "%" in text:
        return find(kind, target_data, context)
    place = text, str(target_data)
    if place not in _sizes:
        _sizes[place] = find(kind, target_data, context)
    return _sizes[place]


def _hash_of_entry(entry, find=DIValue.__hash__):
    """An entry never changes."""
    if not hasattr(entry, "_hash"):
        entry._hash = find(entry)
    return entry._hash


_QUICK = ((TargetConfig, "values", _values), (BaseFunction, "get_call_type", _call_type),
          (postproc.PostProcessor, "run", _post_process), (Type, "get_abi_size", _abi_size),
          (DIValue, "__hash__", _hash_of_entry))


@contextmanager
def quickly():
    """Numba answers these questions at once until the context ends."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in _QUICK]
    for owner, name, quick in _QUICK:
        setattr(owner, name, quick)
    try:
        yield
    finally:
        for owner, name, slow in before:
            setattr(owner, name, slow)
