"""Looking into a model: the logits of a whole text, hidden states, what attention looks at, and what happens when a
state is changed.

    seen = engine.look("The cat sat on the", at=["layer 2", "attention 3", "logits"])
    seen["attention 3"][0, -1]          # what head 0 of layer 3 looks at from the last token, a weight for each token

A text runs through the layers as prompts do, pass by pass. A *tap* sees the hidden states after each layer. The text
may hold an answer (`then`): its rows are then computed by the prefill family of kernels, which rounds differently from
the decode family that gave the answer its tokens.

What can be looked at, by name; n tokens, or those of `rows`:

    embedding       float32 [n, hidden]             what enters the first layer
    layer 3         float32 [n, hidden]             the residual stream behind a layer
    queries 3       float32 [n, heads, head_dim]    of an attention layer: normed, rotated, with the scale head_dim^-1/2
    keys 3          float32 [tokens, kv heads, head_dim]    of all tokens: normed, rotated, as the KV cache rounds them
    values 3        float32 [tokens, kv heads, head_dim]    as the KV cache rounds them
    attention 3     float32 [heads, n, tokens]      the weights of a softmax: each row adds up to 1
    logits          float32 [n, vocabulary]

Attention's kernel keeps no weights, so NumPy computes them in float32 from the layer's own queries and keys, which are
halves or of few bits. The kernel adds its scores in half precision in part; so its weights are those here to within
about a thousandth. In KV formats of few bits, queries, keys and values are turned (kernels/hadamard.py); they are shown
turned back, with the format's rounding errors.
"""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from engine import talk
from engine.request import Request, RequestError
from engine.sight import PromptPictures, pictures_of
from kernels.kv_cache import Pages, read_pages
from kernels.kv_formats import PAGE, turned_back

HEAD_ROWS = 8               # most rows of logits computed at once when a whole text is evaluated (`logit_rows`)
HEADS = "queries", "keys", "values", "attention"            # what attention layers have, by name


# ---- texts that run through the layers ---------------------------------------------------------------------


def passes(engine, ids: list[int], pictures: PromptPictures, tap=None) -> Iterator[range]:
    """Runs a text through the layers; yields the positions of each pass when it is queued. tap(positions, slot, name,
    array): sees each hidden state on its card. The text takes a slot, and the engine does nothing else, until the last
    pass is out."""
    Request(list(ids)).check(engine.config.n_vocab, engine.n_ctx + 1)
    pipeline = engine.pipeline
    with engine.scheduler.borrow_slot(len(ids)) as sequence:
        slot = sequence.slot
        pipeline.prepare_slot(slot, sequence.generation.request, lag=pictures.lag)
        for start in range(0, len(ids), engine.chunk):
            positions = range(start, min(start + engine.chunk, len(ids)))
            seen = pipeline.show(pictures, start, positions.stop)
            pipeline.prefill(ids[start:positions.stop], slot, start, seen=seen,
                             tap=tap and functools.partial(tap, positions, slot), is_sparse=engine.sparse == "on")
            yield positions


def logit_rows(engine, ids: list[int], tap=None, pictures=()) -> Iterator[np.ndarray]:
    """Yields what `evaluate` returns, up to HEAD_ROWS rows at a time: the logits of a long text take gigabytes.

    The text takes a slot, and the engine does nothing else, until the last rows are out.
    """
    passing = tap and (lambda positions, slot, name, array: tap(name, array))
    for positions in passes(engine, ids, pictures_of(ids, pictures, engine.eyes), passing):
        for row in range(0, len(positions), HEAD_ROWS):
            yield engine.pipeline.logits(row, min(HEAD_ROWS, len(positions) - row))


def evaluate(engine, ids: list[int], tap=None, pictures=()) -> np.ndarray:
    """Logits float32 [len(ids), n_vocab] after each token of a text. The text runs through the layers as prompts do.
    pictures: as a Request has them.

    `tap(name, array)` sees the hidden states of each pass on the card: "embedding", "layer 0", ...
    """
    logits, start = np.empty((len(ids), engine.config.n_vocab), np.float32), 0
    for rows in logit_rows(engine, ids, tap, pictures):
        logits[start:start + len(rows)] = rows
        start += len(rows)
    return logits


# ---- looking -----------------------------------------------------------------------------------------------


class Look(dict):
    """What was looked at: an array for each name.

    ids: of the text. tokens: the text of each. rows: the positions that the arrays have rows of. pictures: the Pictures
    in the text; spans: the positions of each, as ranges.
    """

    def __init__(self, engine, ids: list[int], rows: np.ndarray, pictures: PromptPictures):
        super().__init__()
        self.ids, self.rows = list(ids), rows
        self.tokens = [engine.tokenizer.decode([token], special=True) for token in ids]
        self.pictures = pictures.pictures
        self.spans = [range(start, start + picture.n_tokens) for start, picture in zip(pictures.starts, self.pictures)]

    def on_picture(self, name: str, row: int = -1, number: int = 0) -> np.ndarray:
        """The attention `name` of a row on the blocks of a picture, float32 [heads, rows of blocks, columns]. row: into
        the arrays; number: of the picture. Raises RequestError."""
        if not -len(self.spans) <= number < len(self.spans):
            raise RequestError("number", f"there is no picture {number}: the text has {len(self.spans)}")
        picture, span = self.pictures[number], self.spans[number]
        return self[name][:, row, span.start:span.stop].reshape(-1, picture.rows, picture.columns)

    def __missing__(self, name):
        raise RequestError("at", f"{name!r} was not looked at, only {', '.join(self)}")

    def __repr__(self):
        arrays = "".join(f"\n  {name}: {array.dtype} {list(array.shape)}" for name, array in self.items())
        return f"a look at {len(self.rows)} of {len(self.ids)} tokens{arrays}"


def look(engine, prompt: str | list, at: str | list[str] = "logits", rows=None,
         patch: dict[str, Callable] | None = None, then: str = "", pictures=(), **template) -> Look:
    """What a model computes for a text, as NumPy arrays by name: see the top of engine/look.py.

    prompt: a text, token ids, or messages as `chat` takes them, which may hold pictures. then: a text behind it, such
    as the model's answer. at: one name or several: "embedding", "logits", "layer 3", and of an attention layer
    "queries 3", "keys 3", "values 3", "attention 3". rows: the positions to look at, [-1] for the last one; by
    default all.
    patch: {"layer 2": change}, where change(x, positions) returns what takes the place of the hidden states x, float32
    [positions, hidden]; everything behind is computed from that. It is called once for each pass.
    pictures: of token ids, as a Request has them. template: `thinking` and `template_kwargs` of messages.

    Raises RequestError for a name that the model does not have; ValueError where a patch changes the shape or returns
    nothing.
    """
    ids, pictures = text_of(engine, prompt, then, pictures, template)
    wanted, patch = list(at) if isinstance(at, list | tuple | set) else [at], {} if patch is None else patch
    check_names(engine.config, wanted, patch)
    observer = Observer(engine, Look(engine, ids, places_of(rows, len(ids)), pictures), wanted, patch)
    for positions in passes(engine, ids, pictures, observer.tap):
        observer.take_logits(positions)
    return observer.look


def text_of(engine, prompt, then: str, pictures, template: dict) -> tuple[list[int], PromptPictures]:
    """The token ids of what is looked at, and its pictures. Raises RequestError."""
    if talk.is_conversation(prompt):
        fields = talk.prompt_of(engine, prompt, **template)
        ids, pictures = fields["prompt_ids"], fields.get("pictures", ())
    else:
        ids = talk.ids_of(engine, prompt)
    ids = ids + (engine.encode(then) if then else [])
    return ids, pictures_of(ids, pictures, engine.eyes)


def places_of(rows, n: int) -> np.ndarray:
    """Positions, of which negative ones count from the end of n tokens, from 0 on; all for None. Raises
    RequestError."""
    try:
        places = np.arange(n)[slice(None) if rows is None else rows]
    except IndexError:
        places = np.zeros(())
    if places.ndim != 1:
        raise RequestError("rows", f"rows must be positions of the {n} tokens, as a list")
    return places


def check_names(config, wanted: list[str], patch: dict):
    """Raises RequestError for names that the model does not have, and where a change is no function."""
    attention = [i for i, kind in enumerate(config.layer_kinds) if kind != "linear"]
    states = ["embedding"] + [f"layer {i}" for i in range(config.n_layers)]
    of_heads = [f"{kind} {i}" for i in attention for kind in HEADS]
    for name in wanted:
        if name not in (*states, *of_heads, "logits"):
            raise RequestError("at", f"there is no {name!r}: embedding, layer 0 to {config.n_layers - 1}, logits, and "
                                     "queries, keys, values and attention of attention "
                                     f"layer{'s' * (len(attention) > 1)} {', '.join(map(str, attention))}")
    for name in patch if isinstance(patch, dict) else ():
        if name not in states:
            raise RequestError("patch", f"{name!r} cannot be patched, only embedding and layer 0 to "
                                        f"{config.n_layers - 1}")
    if not isinstance(patch, dict) or not all(map(callable, patch.values())):
        raise RequestError("patch", 'patch is {"layer 2": change}, where change(x, positions) is a function')


class Observer:
    """Fills a Look while a text runs through the layers, and patches hidden states."""

    def __init__(self, engine, look: Look, names: list[str], patch: dict[str, Callable]):
        self.pipeline, self.look, self.patch = engine.pipeline, look, patch
        self.stages = {index: stage for stage in engine.pipeline.stages for index in stage.layers}
        for name in names:
            look[name] = np.zeros(shape_of(name, engine.config, len(look.rows), len(look.ids)), np.float32)

    def tap(self, positions: range, slot: int, name: str, x):
        """Sees the hidden states x of a pass on their card, behind a layer."""
        n = len(positions)
        if name in self.patch:
            before = x.card.download(x[:n])
            after = self.patch[name](before, np.array(positions))
            if after is None:
                raise ValueError(f"the patch of {name} returns nothing")
            after = np.ascontiguousarray(after, np.float32)
            if after.shape != before.shape:
                raise ValueError(f"the patch of {name} made {list(after.shape)} of {list(before.shape)}")
            x.card.copy_in(x[:n], after)
        to, rows = self.rows_in(positions)
        if name in self.look:
            self.look[name][to] = x.card.download(x[:n])[rows]
        if name.startswith("layer"):
            self.see_heads(int(name.split()[1]), slot, positions)

    def rows_in(self, positions: range) -> tuple[np.ndarray, np.ndarray]:
        """Which rows of the Look a pass computes, and which rows of the pass these are."""
        rows = self.look.rows
        to = np.flatnonzero((rows >= positions.start) & (rows < positions.stop))
        return to, rows[to] - positions.start

    def see_heads(self, index: int, slot: int, positions: range):
        """Queries, keys, values and attention of a layer, which has just been queued."""
        queries, keys, values, attention = (f"{kind} {index}" for kind in HEADS)
        wanted = self.look.keys() & {queries, keys, values, attention}
        if not wanted:
            return
        stage, (to, rows) = self.stages[index], self.rows_in(positions)
        pages, end = stage.cache.pages[index], positions.stop
        q = stage.card.download(stage.model.scratch.q[:len(positions)])[rows]
        q = turned_back(pages.format, q).astype(np.float32)
        if queries in wanted:
            self.look[queries][to] = q
        if attention in wanted:
            self.look[attention][:, to, :end] = softmax_weights(q, tokens_of(pages, "keys", slot, end),
                                                                rows + positions.start)
        for name, kind in (keys, "keys"), (values, "values"):
            if name in wanted:
                self.look[name][:end] = tokens_of(pages, kind, slot, end)

    def take_logits(self, positions: range):
        """The logits of a pass, which was queued last."""
        to, rows = self.rows_in(positions)
        for first in range(0, len(positions), HEAD_ROWS) if "logits" in self.look else ():
            here = (rows >= first) & (rows < first + HEAD_ROWS)
            if here.any():
                logits = self.pipeline.logits(first, min(HEAD_ROWS, len(positions) - first))
                self.look["logits"][to[here]] = logits[rows[here] - first]


def shape_of(name: str, config, n: int, n_tokens: int) -> tuple[int, ...]:
    """The shape of what has this name, for n of the tokens."""
    shapes = {"queries": (n, config.n_heads, config.head_dim), "attention": (config.n_heads, n, n_tokens),
              **dict.fromkeys(("keys", "values"), (n_tokens, config.n_kv_heads, config.head_dim)),
              "logits": (n, config.n_vocab)}
    return shapes.get(name.split()[0], (n, config.hidden_dim))


def tokens_of(pages: Pages, name: str, slot: int, n: int) -> np.ndarray:
    """The "keys" or the "values" of the first n tokens of a slot, float32 [n, kv heads, head_dim]."""
    rows, array = pages.format.kinds[name], {"keys": pages.k, "values": pages.v}[name]
    table = array.card.download(pages.block_table[slot])[:-(-n // PAGE)]
    held = np.stack([array.card.download(array[int(page)]) for page in table])      # the slot's pages alone
    return turned_back(rows, read_pages(rows, held, np.arange(len(held))[None], 0, n)).astype(np.float32)


def softmax_weights(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """softmax(q k^T), float32 [heads, rows, keys]. q: [rows, heads, head_dim], with attention's scale; k: [keys, kv
    heads, head_dim]. The row at a position sees the keys up to there."""
    scores = np.einsum("rhd,khd->hrk", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1), optimize=True)
    scores[:, np.arange(len(k)) > positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
