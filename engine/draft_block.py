"""The draft block: a small layer behind the model's own that guesses what comes next (`blk.N.nextn.*`; next-token
prediction, "MTP").

    slot t:    token x_t ── embedding ── enorm ──┐
                                                 eh_proj ── attention layer ── shared_head_norm ── head ── draft
               h_(t-1) ── first norm ── hnorm ───┘           with its own pages                            of x_(t+1)

h_(t-1) is the model's residual stream where it had read x_(t-1). So when the model has chosen x_t, the block guesses
x_(t+1) for the price of one layer. A second draft takes the first one as its token and the block's own output as h, and
so on: a chain of up to seven. The model checks all drafts, so they change no token.

The block's keys and values lie in pages like those of any attention layer, behind the same block table. They are
written during prompts (`prefill`: keys and values alone, the rest of the layer is not needed) and in every decode step
(`draft`), for the tokens that the step has chosen. A chain also writes those of its drafts, beyond the newest token and
within its page; they are overwritten when the tokens there are chosen.

qengine.py defines the passes of the layer itself: this file gets the layer, and calls its parts.
"""

import copy
import dataclasses
from collections.abc import Callable

import numpy as np

from engine.scratch import Activation, Scratch
from engine.weights import Stack
from kernels import attend_decode, draft_head, draft_input, draft_list, embedding, kv_cache
from kernels.card import Array
from kernels.operands import Matrix
from kernels.records import LISTED, DraftHead, Projected

PIECE = 512                 # rows of a prompt's pass that go through the block at once
LOW_ROWS = 98_304           # token ids that the head for drafts knows, from 0 on. Frequent tokens have low ids
LAST_ROWS = 512             # and so many from the end of the vocabulary, where control tokens stand. Beside these it
                            # knows tokens of the prompt and of the answer: each slot's list (kernels/draft_list.py)


class DraftBlock:
    """The weights of a draft block on a card, its scratch memory and its passes.

    layer: the block's layer, of the kind `KIND`, with `mixer` and `mlp` as the model's layers have them.
    """

    KIND = "attention"

    def __init__(self, tensors, layer, head: Matrix, pass_of: Callable, low_rows: int = LOW_ROWS):
        """tensors: of the block, with `matrix` and `vector` by name. head: the output head. pass_of(inputs, n): a
        decode step's pass of n rows, which lie at the start of the int32 array `inputs`. low_rows: see LOW_ROWS."""
        self.layer, self.pass_of = layer, pass_of
        self.eh_proj = tensors.matrix("nextn.eh_proj")
        self.e_norm, self.h_norm = tensors.vector("nextn.enorm.weight"), tensors.vector("nextn.hnorm.weight")
        self.head_norm = tensors.vector("nextn.shared_head_norm.weight")
        heads, stack = layer.mixer.heads, layer.mixer.in_proj
        self.kv_proj = columns_of(stack, heads.k_column, heads.n_columns)
        self.whole_head, self.low_rows = head, low_rows if low_rows + LAST_ROWS < head.n else head.n

    @staticmethod
    def shapes(config) -> dict[str, tuple[int, ...]]:
        """The tensors that a block has beside those of its layer."""
        hidden = config.hidden_dim
        return {"nextn.eh_proj.weight": (hidden, 2 * hidden), "nextn.enorm.weight": (hidden,),
                "nextn.hnorm.weight": (hidden,), "nextn.shared_head_norm.weight": (hidden,)}

    @property
    def prompt_products(self) -> tuple:
        """What a token of a prompt is multiplied by."""
        return self.eh_proj, self.kv_proj

    def allocate(self, card, hidden_dim: int, max_rows: int, step_rows: int):
        """Takes scratch memory for prompts' passes of up to max_rows rows, and for decode steps of up to step_rows
        rows, so of up to so many slots."""
        rows, c = max(min(max_rows, PIECE), step_rows), 2 * hidden_dim
        self.x = card.alloc((rows, hidden_dim), np.float32, "draft block's residual stream")
        self.e = card.alloc((rows, hidden_dim), np.float32, "draft block's embeddings")
        self.both = Activation(c, *(card.alloc(*each) for each in Activation.layout("both", c, rows).values()))
        self.hidden = card.zeros((step_rows, hidden_dim), np.float32, "hidden rows after prompts")
        # before[i] = i - 1: the row before row i; the row before the first of a pass is in `hidden`
        self.before = card.upload(np.arange(-1, max_rows, dtype=np.int32), "rows before rows")
        self.newest = card.alloc(6 * step_rows, np.int32, "ids, slots and positions of chosen tokens")
        self.drafts = card.alloc(6 * step_rows, np.int32, "ids, slots and positions of drafts")
        self.sources = card.alloc(step_rows, np.int32, "hidden rows of chosen tokens")
        self.limits = card.alloc(step_rows, np.int32, "positions where drafts end")
        self._allocate_head(card, step_rows)

    def _allocate_head(self, card, n_slots: int):
        whole, low = self.whole_head, self.low_rows
        parts = [(0, whole.rows(0, low))] + [(low, whole.rows(whole.n - LAST_ROWS, whole.n))] * (low < whole.n)
        n_shared, lists = sum(matrix.n for _, matrix in parts), (None, None)
        if low < whole.n:
            lists = (card.alloc((n_slots, LISTED), np.int32, "lists of tokens for drafts"),
                     card.zeros(n_slots, np.int32, "entries of the lists of tokens"))
            card.fill(lists[0], 0xFF)
        self.known = DraftHead(low, whole.n - n_shared, n_shared, *lists)
        self.head = Stack(tuple(parts), self.known.columns)
        self.logits = card.alloc((n_slots, self.known.columns), np.float32, "logits of drafts")
        best = draft_head.scratch_shape(n_slots, self.known.columns)
        self.best = (card.alloc(best, np.uint32, "best drafts of each chunk of the head"),
                     card.zeros(n_slots, np.uint32, "chunks of the head for drafts that have arrived"))

    def forget(self, slot: int, prompt=()):
        """Call it before the first pass of a prompt with these token ids: the row before that pass counts as missing,
        as at position 0. After a cached beginning there was such a row, but nobody has kept it; the first row of the
        new part is then a little less like what the block was trained on."""
        card, known = self.hidden.card, self.known
        card.fill(self.hidden[slot], 0)
        if known.listed is not None:
            ids = np.unique(np.array(prompt, np.int32))
            ids = ids[(ids >= known.n_low) & (ids < known.n_low + known.skipped)][:LISTED]
            card.copy_in(known.listed[slot], np.pad(ids, (0, LISTED - ids.size), constant_values=-1))
            card.copy_in(known.n_listed[slot:slot + 1], np.array([ids.size], np.int32))

    def prefill(self, model, run, cache):
        """After a prompt's pass `run`, whose residual stream is in the model's scratch.x: the block's keys and values
        for its tokens. Row t takes its token and the hidden row before it."""
        rows, mixer, pages = run.rows, self.layer.mixer, cache.kept[model.config.n_layers]
        view, stride = self._view(model), mixer.in_proj.stride
        for start in range(0, rows.n, PIECE):
            n = min(PIECE, rows.n - start)
            piece = dataclasses.replace(run, rows=dataclasses.replace(rows, n=n, ids=rows.ids[start:],
                                                                      places=rows.places.rows_from(start)))
            self._combine(view, piece, model.scratch.x, model.head_norm, self.before[start:])
            products = view.scratch.projected.reshape(-1)[start * stride:]
            view.multiply_normed(piece, self.kv_proj, mixer.norm, self.x, products)
        qkv = mixer.qkv(view, run, Projected(view.scratch.projected, stride))
        kv_cache.store_kv(model.card, pages, qkv, rows.places, rows.n)
        draft_input.keep_hidden(model.card, self.hidden, model.scratch.x, rows.places.slots, rows.n - 1)

    def draft(self, model, x: Array, outcomes: Array, answers: Array, sizes: tuple[int, int, int], cache):
        """After a decode step of n answers with `width` rows each: the block's keys and values for the tokens in
        `outcomes`, then up to n_drafts drafts for each answer, into its NEXT_DRAFTS (kernels/advance.py has the
        records; -1: none). The launches can be recorded.

        x: the model's residual rows of the step, float32 [n * width, hidden]; of the last row of a prompt if the tokens
        were chosen from that. sizes: (n, width, n_drafts). The block table must have a page for the position of every
        chosen token."""
        card, view, mixer, (n, width, n_drafts) = model.card, self._view(model), self.layer.mixer, sizes
        pages, chosen, run = cache.kept[model.config.n_layers], self.pass_of(self.newest, n * width), None
        draft_input.draft_rows(card, chosen.rows, (self.sources, self.limits), (answers, outcomes), self.known,
                               cache.lags, n, width)
        self._combine(view, chosen, x, model.head_norm, self.sources)
        qkv = mixer.project_qkv(view, chosen)
        if width > 1 or not n_drafts:               # attention stores the first n rows, the newest tokens, by itself
            kv_cache.store_kv(card, pages, qkv, chosen.rows.places, n * width)
        for number in range(n_drafts):
            places = run.rows.places if number else chosen.rows.places
            if number:
                self._combine(view, run, self.x, self.head_norm, self.before[1:])
                qkv = mixer.project_qkv(view, run)
            else:
                run = self.pass_of(self.drafts, n)
            self._attend(view, run, qkv, pages, places)
            self.layer.mlp.decode(view, run)
            view.multiply_normed(run, self.head, self.head_norm, self.x, self.logits)
            if self.known.listed is not None:
                u = view.scratch.activations[self.whole_head.k]         # which the products of several parts have left
                draft_list.listed_logits(card, self.logits.reshape(-1)[self.known.n_shared:], self.known.columns,
                                         self.known.listed, places.slots, self.whole_head, u, n)
            draft_head.choose_draft(card, run.rows, (places, self.limits, cache.lags), outcomes, self.logits, self.best,
                                    self.known, number)

    def _view(self, model):
        """The model with the block's own residual stream: the model's may still be wanted."""
        view = copy.copy(model)
        view.scratch = Scratch(model.scratch.arrays | {"x": self.x})
        return view

    def _combine(self, view, run, x: Array, first_norm: Array, sources: Array):
        """The block's residual stream, from the tokens of a pass and the rows `sources` of x."""
        card, table, both, n = view.card, view.embeddings, self.both, run.rows.n
        embedding.embed(card, table.format, self.e, run.rows.ids, table.values, table.scales, n, table.k)
        out = (both.q, both.d) if self.eh_proj.is_quantized else (both.x, None)
        draft_input.draft_input(card, out, self.e, x, self.hidden, (n, sources, run.rows.places.slots),
                                (self.e_norm, first_norm, self.h_norm), view.config.norm_eps)
        view.project(run, self.x, self.eh_proj, both)

    def _attend(self, view, run, qkv, pages, places):
        """Adds attention of the first rows of qkv, which stand at `places`. Never `early`: the launches right before
        this one have written positions and pages."""
        u, out_proj = view.scratch.activations[self.layer.mixer.out_proj.k], self.layer.mixer.out_proj
        out = (u.q, u.d) if out_proj.is_quantized else (u.x, None)
        attend_decode.attend_decode(view.card, out, qkv, pages, places, view.attention_scratch, run.rows.n)
        view.project(run, self.x, out_proj, u, add=True)


def columns_of(stack: Stack, start: int, stop: int) -> Stack:
    """The part of a Stack whose products are the columns start .. stop - 1; they keep their places in a row."""
    parts = []
    for column, matrix in stack.parts:
        first, last = max(start - column, 0), min(stop - column, matrix.n)
        if first < last:
            parts.append((column + first, matrix.rows(first, last)))
    return Stack(tuple(parts), stack.stride)
