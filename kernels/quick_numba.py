"""Numba's compiler, with less work done twice: kernels compile sooner, to the same PTX (benchmarks/results.md).

Numba asks itself the same questions thousands of times for each kernel. Inside `quickly()` these are answered at
once; everything else is Numba's own code:

    question                                       what takes Numba long
    which options hold?                            a dozen getters in Python, each time that a type is looked up
    what does `a + b` of these types return?       all kinds of addition are tried in turn, at each addition
    which variables live at the start of a block?  found after each pass, though generators alone want to know
    after which statement does a variable die?     found three times, twice for what lists and closures alone need
    where is a variable that is set twice?         each statement is looked at twice for each of these variables
    which variables does a statement name?         all its fields are gone through, places in the source text too
    which variables does a scope lack?             asked for each block, though all blocks have one scope
    what are the parameters of a function?         its code is gone through at each call
    how many bytes does a value take?              LLVM reads a module that it writes for this question
    what is the hash of an entry in a line table?  the entry, its function and all types are gone through

The answers depend on their questions alone, so they hold for other threads and for later kernels, too.
"""

import inspect
import types as python_types
from contextlib import contextmanager

from llvmlite.ir.types import Type
from llvmlite.ir.values import DIValue
from numba.core.types.functions import BaseFunction
from numba.cuda import utils
from numba.cuda.core import ir, ir_utils, postproc, ssa, transforms, untyped_passes
from numba.cuda.core.targetconfig import ConfigStack, TargetConfig
from numba.cuda.target import CUDATypingContext

_defaults = {}                                  # class of options -> name -> value
_signatures = {}                                # (function, ..., types of arguments, options) -> signature of the call
_sizes = {}                                     # (type in LLVM's words, layout of the target) -> bytes
_nameless = {ir.Loc, str, int}                  # types of fields of statements that name none
_parameters = {}                                # code object -> signature of functions that have nothing else
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


def _post_process(processor, emit_dels=False, extend_lifetimes=None, run=postproc.PostProcessor.run):
    """What follows a pass, without looking for variables that live where blocks start. Three passes ask where variables
    die. The last of them, which also says how long they live, is for lowering. The others need it for lists and
    closures alone."""
    function = processor.func_ir
    emit_dels = emit_dels and (extend_lifetimes is not None or _makes_lists_or_closures(function))
    if function.is_generator:
        run(processor, emit_dels, extend_lifetimes)
        return
    function.blocks = transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)
    function.generator_info = None
    if emit_dels:
        processor._insert_var_dels(extend_lifetimes=bool(extend_lifetimes))


def _makes_lists_or_closures(function):
    return any(isinstance(s, ir.assign_types) and isinstance(s.value, ir.expr_types)
               and s.value.op in ("build_list", "make_function")
               for block in function.blocks.values() for s in block.body)


def _rewrite_blocks(blocks, states, handler):
    """A pass that gives one variable a name for each place where it is set, in copies of the blocks. Only statements
    that name it are handed on."""
    change = _set_anew if isinstance(handler, ssa._FreshVarHandler) else _use_anew
    renamed = {}
    for label, block in blocks.items():
        states["label"], states["block"] = label, block
        renamed[label] = copy = ir.Block(scope=block.scope, loc=block.loc)
        copy.body = change(block.body, states, handler)
    return renamed


def _set_anew(statements, states, handler):
    name = states["varname"]
    return [handler.on_assign(states, s) if isinstance(s, ir.assign_types) and s.target.name == name else s
            for s in statements]


def _use_anew(statements, states, handler):
    name, variables, changed = states["varname"], handler._cache_list_vars, []
    used = vars(variables).setdefault("used", {})       # id of a statement -> (it, names of variables that it uses)
    for s in statements:
        if id(s) not in used:
            used[id(s)] = s, _used(s, variables)
        if name in used[id(s)][1]:
            s = (handler.on_assign if isinstance(s, ir.assign_types) else handler.on_other)(states, s)
        changed.append(s)
    return changed


def _used(statement, variables):
    node = statement.value if isinstance(statement, ir.assign_types) else statement
    if isinstance(node, ir.var_types):
        return {node.name}
    return {variable.name for variable in variables.get(node)} if isinstance(node, ir.inst_types) else set()


def _list_variables(statement, value, find=ir.Inst._rec_list_vars):
    """The variables in the fields of a statement."""
    kind = type(value)
    if kind is ir.Var:
        return [value]
    if kind in _nameless:
        return []
    if kind not in (dict, tuple, list):
        if not isinstance(value, (*ir.var_types, *ir.inst_types, list, tuple, dict)):
            _nameless.add(kind)
        return find(statement, value)
    found = []
    for field in value.values() if kind is dict else value:
        if type(field) is ir.Var:
            found.append(field)
        elif type(field) not in _nameless:
            found += _list_variables(statement, field)
    return found


def _variables_of(statement, find=ir_utils.compat_list_vars_stmt):
    return statement.list_vars() if type(statement) is ir.Assign else find(statement)


def _complete_scopes(blocks, complete=ir_utils.fixup_var_define_in_scope):
    """Blocks that share a scope are given as one block."""
    first, *others = blocks.values()
    if all(block.scope is first.scope for block in others):
        together = ir.Block(first.scope, first.loc)
        together.body = [statement for block in blocks.values() for statement in block.body]
        blocks = {0: together}
    complete(blocks)


def _signature(function, find=inspect.signature, **how):
    """The parameters of a function. Where it has nothing but its code, functions of the same code have the same."""
    if type(function) is not python_types.FunctionType or how or function.__dict__ or function.__defaults__ \
            or function.__kwdefaults__ or function.__annotations__:
        return find(function, **how)
    if function.__code__ not in _parameters:
        if len(_parameters) >= MOST_SIGNATURES:
            _parameters.clear()
        _parameters[function.__code__] = find(function)
    return _parameters[function.__code__]


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
          (DIValue, "__hash__", _hash_of_entry), (ssa, "_run_block_rewrite", _rewrite_blocks),
          (ir.Inst, "_rec_list_vars", _list_variables), (ir_utils, "compat_list_vars_stmt", _variables_of),
          (untyped_passes, "fixup_var_define_in_scope", _complete_scopes), (inspect, "signature", _signature),
          (utils, "pysignature", _signature))


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
