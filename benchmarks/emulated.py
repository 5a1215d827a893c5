"""How fast the emulated card is: `python -m benchmarks.emulated [workers] [MODEL ...]` prints a table; one worker by
default.

Times are the best of several repeats of whole launches, called from Python through the native layer. Products of
matrices that fit no cache are compared with a native loop that reads the same weights, each worker a part. For each
MODEL, a GGUF file or synthetic:NAME, follows a decode step, compared with the loop over its weights, and tokens/s:
plain, with drafts that are right with a chance of ACCEPTANCE (cli/checks.py says how), and with as many drafts as the
engine thinks fit. A line with a goal says whether it is reached. Only figures of a quiet machine count.
"""

import ctypes
import sys
import threading
import time

import numpy as np
from numba import cuda
from numba.types import uint32

import qengine
from cli.bench import Bench
from cli.checks import ACCEPTANCE, EMULATED_TOKENS, CheckBench, room_for
from cli.ending import run_program
from engine.expert_store import arrays_of
from kernels import q8_gemm, q8_gemv
from kernels.emulated import native
from kernels.norm import NormInput
from kernels.open import open_cards
from kernels.operands import Quantized

REPEATS = 10                                         # of a product in a list: the processor's vector units wake slowly
LINES = 8                                            # of 64 bytes, that the native loop reads at once
CONTEXT = 297                                        # tokens before an answer
DRAFTS = 1, 2, 3                                     # in a step; the best of them counts
LOOP_SHARE = 0.70                                    # goals: of a decode step, of the native loop's rate,
DRAFTED = 1.3                                        # of decoding with drafts, in plain tokens/s, and
NEVER_SLOWER = 0.97                                  # of the engine's own choice; the rest to 1 is noise of the clock
PLAIN = {"tiny-moe_mtp": 300}                        # name of a model -> plain tokens/s on two cores


@cuda.jit
def nothing(x):
    x[uint32(0)] = uint32(1)


def programs(card, record):
    """The launches that `record` makes, one native Program for each; nothing is executed."""
    with card.record() as recording:
        record()
    program = native.Program([launch.native for launch in recording.stream.recorded])
    program.keep = recording                         # and with it the arrays that the launches use
    return program


def best_seconds(run, workers, seconds=0.5):
    """The shortest time of run(), over at least `seconds`; of one worker the processor time, so that other programs on
    the machine do not count."""
    clock = time.thread_time if workers == 1 else time.perf_counter
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def product(card, multiply, n, k, rows):
    """(program, multiply-accumulates) of a Q8_0 matrix product of random operands."""
    random = np.random.default_rng(0)
    w, x = q8_gemv.random_q8(random, n, k), q8_gemv.random_activations(random, rows, k)
    operands = q8_gemv.upload_q8(card, w, x)
    y = card.zeros((rows, n), np.float32)
    return programs(card, lambda: multiply(card, y, n, *operands, rows)), n * k * rows


# ---- reading memory ----------------------------------------------------------------------------------------

def reader():
    """A native function (address, bytes) that reads memory as fast as one thread can: bytes a multiple of 512."""
    lines = range(LINES)
    sums = "\n".join(f"%s{i} = phi <8 x i64> [zeroinitializer, %entry], [%t{i}, %loop]" for i in lines)
    loads = "\n".join(f"""%p{i} = getelementptr i8, ptr %p, i64 {64 * i}
    %l{i} = load volatile <8 x i64>, ptr %p{i}, align 64
    %t{i} = add <8 x i64> %s{i}, %l{i}""" for i in lines)
    ir = f"""target triple = "{native.host().triple}"
    define void @read(ptr %from, i64 %n) {{
    entry: br label %loop
    loop: %i = phi i64 [0, %entry], [%j, %loop]
    {sums}
    %p = getelementptr i8, ptr %from, i64 %i
    {loads}
    %j = add i64 %i, {64 * LINES}
    %more = icmp ult i64 %j, %n
    br i1 %more, label %loop, label %end
    end: ret void
    }}"""
    engine = native._loaded(native.compile_object(ir, native.host()), native.host())
    read = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(engine.get_function_address("read"))
    read.engine = engine                             # it holds the code
    return read


def read_all(read, arrays, workers):
    """Reads arrays of a card on `workers` threads, each its part of every array."""
    def work(number):
        for array in arrays:
            each = array.nbytes // workers // 512 * 512
            read(array.ptr + number * each, each)

    helpers = [threading.Thread(target=work, args=(number,)) for number in range(1, workers)]
    for helper in helpers:
        helper.start()
    work(0)
    for helper in helpers:
        helper.join()


def reached(value, goal):
    return f"; goal {goal:.2f}: {'reached' if value >= goal else 'missed'}"


def compare(what, run, read, arrays, workers, goal=None):
    """Prints how fast `run`, which uses the weights `arrays`, reads them, and the native loop at the same time."""
    nbytes, ours, loop = sum(array.nbytes for array in arrays), [], []
    for _ in range(5):                               # in turn, since the memory's speed varies
        ours.append(best_seconds(run, workers, 0.1))
        loop.append(best_seconds(lambda: read_all(read, arrays, workers), workers, 0.1))
    ours, loop = min(ours), min(loop)
    print(f"{what:40} {ours * 1e6:8.1f} us {nbytes / ours / 1e9:7.1f} GB/s, {loop / ours:.2f} of a native loop's "
          f"{nbytes / loop / 1e9:.1f}{'' if goal is None else reached(loop / ours, goal)}")


def from_memory(card, read, n, k, workers):
    """Compares the decode products of one matrix [n, k], too large for any cache, with the loop."""
    random = np.random.default_rng(0)
    w, x = q8_gemv.upload_q8(card, q8_gemv.random_q8(random, n, k), q8_gemv.random_activations(random, 1, k))
    y = card.zeros((1, n), np.float32)
    column = NormInput(card.zeros((1, k), np.float32), card.zeros(k, np.float32), 1e-6)
    out = Quantized(card.zeros((1, n // 2), np.int8), card.zeros((1, n // 64), np.float32))
    for name, launch in (
            ("q8_gemv", lambda: q8_gemv.gemv_q8_q8(card, y, n, w, x, 1)),
            ("with norm", lambda: q8_gemv.norm_gemv(card, q8_gemv.Q8, y, n, w, column, x, 1)),
            ("with norm and swiglu", lambda: q8_gemv.norm_gemv_swiglu(card, q8_gemv.Q8, out, w, column, x, 1))):
        program = programs(card, launch)
        compare(f"{name} n={n} k={k}", lambda: native.execute(program, workers), read, [w.values, w.scales], workers)


def weights_of_a_step(stage):
    """The arrays that a decode step of one row reads: of a layer's experts as many as a row uses, the first ones."""
    layers = stage.model.layers
    experts = [each for layer in layers for each in getattr(layer.mlp, "experts", ())]
    used = [each.home.rows(0, stage.model.config.n_used_experts * each.n) for each in experts]
    whole = [m for layer in layers for m in qengine.matrices(layer)] + [stage.model.head]
    return [array for m in whole + used for array in arrays_of(m)]


def answer_speeds(engine, **fields):
    """(tokens/s, tokens for each second of this process's processor time) of an answer, from its first token on. Other
    programs on the machine slow down the former alone. fields: of the Request."""
    engine.clear_cache()
    generation = engine.submit(qengine.Request(list(range(CONTEXT)), max_tokens=EMULATED_TOKENS, ignore_eos=True,
                                               **fields))
    next(iter(generation))
    started, first = time.process_time(), len(generation.token_times)
    generation.wait()
    seconds, times = time.process_time() - started, generation.token_times
    return (len(times) - 1) / (times[-1] - times[0]), (len(times) - first) / seconds


def decoding(model, read, workers):
    """Decodes with a model: the decode step beside the loop over the weights that it reads, and tokens/s, plain and
    with drafts."""
    engine = qengine.load(model, card="emulated", ctx=CONTEXT + room_for(EMULATED_TOKENS), slots=1, progress=False)
    (stage,) = engine.pipeline.stages
    stage.card.threads = workers
    plain, chosen = [], []
    for _ in range(3):                               # in turn, as in `compare`
        plain.append(answer_speeds(engine, draft=0))
        chosen.append(answer_speeds(engine))
    stage.card.synchronize()
    step = next(recording for key, recording in stage.recordings.made.items()
                if key[:2] == ("launch_step", qengine.StepShape(1))).programs[0]
    compare(f"a decode step of {engine.name}", lambda: native.execute(step, workers), read, weights_of_a_step(stage),
            workers, LOOP_SHARE)
    (plain, least), (chosen, processor) = (tuple(map(max, zip(*speeds))) for speeds in (plain, chosen))
    goal = reached(plain, PLAIN[engine.name]) if workers == 2 and engine.name in PLAIN else ""
    print(f"{f'decoding after {CONTEXT} tokens, plain':40} {plain:8.1f} tokens/s{goal}")
    print(f"{'as many drafts as the engine thinks fit':40} {chosen:8.1f} tokens/s, {processor / least:.2f} x by "
          f"processor time{reached(processor / least, NEVER_SLOWER)}")
    checks = CheckBench(Bench(engine, [], 3, 1), EMULATED_TOKENS)
    found = [checks.drafted(CONTEXT, n, ACCEPTANCE) for n in DRAFTS]
    for one in found:
        print(f"{f'{one.drafts} drafts, right with a chance of {ACCEPTANCE}':40} {one.tokens_per_s:8.1f} tokens/s, "
              f"{one.factor:.2f} x plain; a check costs {one.check_cost:.2f} plain steps")
    best = max(one.factor for one in found)
    print(f"{'the best of these':40} {best:8.2f} x plain{reached(best, DRAFTED)}")
    engine.close()


def main(workers=1, *models):
    card = open_cards("emulated")[0]
    print(f"{card.describe()}; {workers} worker{'s' * (workers > 1)}")
    x = card.zeros(1, np.uint32)
    one = programs(card, lambda: card.launch(nothing, 1, 32, x))
    many = programs(card, lambda: [card.launch(nothing, 1, 32, x) for _ in range(1000)])
    run = lambda program: lambda: native.execute(program, workers)
    print(f"{'one launch from Python':40} {best_seconds(run(one), workers) * 1e6:8.2f} us")
    print(f"{'a launch within a list of 1,000':40} {best_seconds(run(many), workers) * 1e3:8.2f} us")
    for name, multiply, shapes in (
            ("q8_gemv", q8_gemv.gemv_q8_q8, [(1024, 1024, 1), (128, 4096, 1), (4096, 4096, 1), (1024, 1024, 8)]),
            ("q8_gemm", q8_gemm.gemm_q8_q8, [(512, 512, 128), (1024, 1024, 64), (1024, 1024, 512)])):
        for n, k, rows in shapes:
            program, operations = product(card, multiply, n, k, rows)
            seconds = best_seconds(run(native.Program(program.launches * REPEATS)), workers) / REPEATS
            case = f"{name} n={n} k={k} {'columns' if name == 'q8_gemv' else 'rows'}={rows}"
            print(f"{case:40} {seconds * 1e6:8.1f} us {operations / seconds / 1e9:7.1f} GMAC/s")
    read = reader()
    for n, k in ((131072, 1024), (32768, 4096)):
        from_memory(card, read, n, k, workers)
    for model in models:
        decoding(model, read, workers)


if __name__ == "__main__":
    run_program(main, int(sys.argv[1]) if sys.argv[1:] else 1, *sys.argv[2:])
