"""The `qwen35` architecture in plain PyTorch, for training: Gated DeltaNet, gated attention, one MTP block.

Parameters are named, shaped and scaled as the GGUF file's tensors: norms multiply by their weight, and value
head j of a linear layer reads key head j mod n_key_heads. Only `ssm_a` differs: its logarithm is kept.

Several documents may be packed in one row. `position` int64 [B, T], a token's index within its document, says
all about it: a document begins where the position is 0, and what lies before it is hidden from convolution,
state and attention.

Of pictures the network knows the rows that models/tower.py makes of them, see `Seen`.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

CHUNK = 64      # tokens of the delta rule's chunked form
RESET = -30.0   # log decay at a document's first token: exp(-30) = 1e-13 is left of what came before
MASK_BLOCK = 128    # queries and keys that flex_attention takes at a time
HEAD_TOKENS = 16384  # tokens whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a network; by default those of qengine-10m."""

    n_vocab: int = 6144
    hidden: int = 256
    ffn: int = 640
    n_layers: int = 8               # without the MTP block
    attention_interval: int = 4     # every so many layers one of attention
    n_heads: int = 2
    n_kv_heads: int = 1
    head_dim: int = 256
    rope_dim: int = 64
    rope_base: float = 1e6
    n_key_heads: int = 2
    n_value_heads: int = 4
    linear_head_dim: int = 128
    conv_width: int = 4
    norm_eps: float = 1e-6
    context: int = 32768
    tied: bool = True

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0


class Seen(NamedTuple):
    """The pictures of packed rows of tokens [B, T]."""

    rope: Tensor    # int64 [B, 3, T]: rotary positions of time, height and width (engine/sight.py has their rule)
    places: Tensor  # int64 [n]: of tokens of pictures, among all B * T
    rows: Tensor    # [n, hidden]: what takes the place of their embeddings in the trunk


# ---- the gated delta rule ------------------------------------------------------------------------------


def recurrent_delta_rule(q, k, v, g, beta, state=None) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token: S = e^g S;  S += k (beta (v - k^T S))^T;  o = S^T q.

    q, k [B, T, n_k, d], q already scaled; v [B, T, n_v, d]; g (log decay), beta [B, T, n_v]; state
    [B, n_v, d, d], key x value, or None for zeros. Returns the outputs [B, T, n_v, d] and the last state.
    """
    repeat = v.shape[2] // k.shape[2]
    q, k = q.repeat(1, 1, repeat, 1), k.repeat(1, 1, repeat, 1)
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - (k[:, t, :, None] @ state).squeeze(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        outputs.append((q[:, t, :, None] @ state).squeeze(2))
    return torch.stack(outputs, 1), state


def chunked_delta_rule(q, k, v, g, beta) -> tuple[Tensor, Tensor]:
    """The same from a zero state by chunks of 64 tokens (Yang et al., "Gated Delta Networks", 2412.06464).

    Within a chunk the tokens' updates solve a unit lower triangular system, whose solution is linear in the
    state S at the chunk's start: updates = U - W S. So is all that follows, the next state too:

        o = (Q - A W) S + A U        S' = (decay - K^T W) S + K^T U

    with A the causal products q k^T and every row decayed to where it is used. All chunks compute these
    matrices at once; only S' is taken chunk by chunk. T is a multiple of 64.
    """
    batch, length, n_v, dim = v.shape
    repeat, n_chunks = n_v // k.shape[2], length // CHUNK

    def chunks(x):  # [B, T, heads, d] -> [chunks, B, heads, 64, d]
        return x.unflatten(1, (n_chunks, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g[..., None], beta[..., None]))
    g = g.cumsum(3)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    decay = (g - g.transpose(3, 4)).masked_fill(later, -math.inf).exp()  # from token j to token i
    products = (torch.cat([k, q], 3) @ k.transpose(3, 4)).repeat(1, 1, repeat, 1, 1)
    q, k = q.repeat(1, 1, repeat, 1, 1), k.repeat(1, 1, repeat, 1, 1)

    inverse = UnitLowerInverse.apply((products[..., :CHUNK, :] * decay * beta).tril(-1))
    w, u = (inverse @ torch.cat([k * (beta * g.exp()), v * beta], 4)).split(dim, 4)
    causal = products[..., CHUNK:, :] * decay
    to_end = (k * (g[..., -1:, :] - g).exp()).transpose(3, 4)
    states = scan_states(g[..., -1:, :].exp(), to_end @ w, to_end @ u)
    outputs = (q * g.exp() - causal @ w) @ states[:-1] + causal @ u
    return outputs.permute(1, 0, 3, 2, 4).reshape(batch, length, n_v, dim), states[-1]


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L [..., n, n] by substitution, always in full float32.

    The series I - L + L^2 - ... would be all matrix products, but its powers explode where keys repeat.
    """

    @staticmethod
    def forward(ctx, lower):
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        transposed = ctx.saved_tensors[0].transpose(-1, -2)
        return -(transposed @ gradient @ transposed).tril(-1)


@torch.library.custom_op("qengine::scan_states", mutates_args=())
def scan_states(decay: Tensor, m: Tensor, r: Tensor) -> Tensor:
    """The states S[0] = 0, S[c + 1] = decay[c] S[c] - m[c] S[c] + r[c].

    decay [chunks, B, heads, 1, 1]; m, r [chunks, B, heads, d, d]; returns [chunks + 1, B, heads, d, d].
    """
    return _scan(decay, m, r, torch.zeros_like(r[0]))


@scan_states.register_fake
def _(decay, m, r):
    return r.new_empty(len(r) + 1, *r.shape[1:])


@torch.library.custom_op("qengine::scan_gradients", mutates_args=())
def scan_gradients(decay: Tensor, m: Tensor, gradient: Tensor) -> Tensor:
    """The same recurrence backwards: each state's own gradient plus that through all later states."""
    return _scan(decay.flip(0), m.flip(0).transpose(3, 4), gradient[:-1].flip(0), gradient[-1]).flip(0)


@scan_gradients.register_fake
def _(decay, m, gradient):
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def _scan(decay, m, r, first):
    """The recurrence from the state `first`, in groups of about sqrt(chunks): all groups at once compute what becomes
    of any state, S -> P S + R, chunk by chunk; then group after group has its first state. So 320 chunks take 36 small
    steps in a row, which wait for each other."""
    n, d = len(r), r.shape[3]
    size = next(size for size in range(math.isqrt(n), 0, -1) if n % size == 0)
    # [size, groups, B heads, ...], and P and R side by side
    decay, m, r = (x.reshape(n // size, size, -1, *x.shape[3:]).transpose(0, 1).contiguous() for x in (decay, m, r))
    both = r.new_empty(*r.shape[:4], 2 * d)
    now = torch.cat([torch.eye(d, dtype=r.dtype, device=r.device).expand_as(r[0]), torch.zeros_like(r[0])], 3)
    for c in range(size):
        now = now * decay[c] - m[c] @ now
        now[..., d:] += r[c]
        both[c] = now
    product, rest = both.transpose(0, 1).split(d, 4)
    starts = [first.flatten(0, 1)]
    for group in range(n // size):
        starts.append(torch.baddbmm(rest[group, -1], product[group, -1], starts[-1]))
    states = product @ torch.stack(starts[:-1])[:, None] + rest
    return torch.cat([starts[0][None], states.flatten(0, 1)]).view(n + 1, *first.shape)


def _scan_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output)


def _scan_backward(ctx, gradient):
    decay, m, states = ctx.saved_tensors
    total, before = scan_gradients(decay, m, gradient)[1:], states[:-1]
    return (total * before).sum((3, 4), keepdim=True), -total @ before.transpose(3, 4), total


scan_states.register_autograd(_scan_backward, setup_context=_scan_setup)


# ---- layers --------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Named(nn.Module):
    """Parameters alone, of the shapes given by name; `Network.initialize` fills them."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class Block(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)). Subclasses have the mixer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.attn_norm = Norm(shape.hidden, shape.norm_eps)
        self.post_attention_norm = Norm(shape.hidden, shape.norm_eps)
        self.ffn_gate = linear(shape.hidden, shape.ffn)
        self.ffn_up = linear(shape.hidden, shape.ffn)
        self.ffn_down = linear(shape.ffn, shape.hidden)

    def forward(self, x, position, rope, mask, cache=None):
        """x [B, T, hidden]; position [B, T]; rope [B, 3, T]: rotary positions; mask: see `attend`; cache: a dict that
        this block keeps for the tokens to come. With one token (T = 1) it goes on from there; with more it starts
        anew."""
        x = x + self.mixer(self.attn_norm(x), position, rope, mask, cache)
        u = self.post_attention_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(u)) * self.ffn_up(u))


class LinearBlock(Block):
    """Gated DeltaNet."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.key_dim = shape.n_key_heads * shape.linear_head_dim
        self.value_dim = shape.n_value_heads * shape.linear_head_dim
        self.attn_qkv = linear(shape.hidden, 2 * self.key_dim + self.value_dim)
        self.attn_gate = linear(shape.hidden, self.value_dim)
        self.ssm_alpha = linear(shape.hidden, shape.n_value_heads)
        self.ssm_beta = linear(shape.hidden, shape.n_value_heads)
        self.ssm_conv1d = Named(weight=(2 * self.key_dim + self.value_dim, shape.conv_width))
        self.ssm_log_a = nn.Parameter(torch.empty(shape.n_value_heads))  # the file's ssm_a is -exp of it
        self.ssm_dt = Named(bias=shape.n_value_heads)
        self.ssm_norm = Norm(shape.linear_head_dim, shape.norm_eps)
        self.ssm_out = linear(self.value_dim, shape.hidden)

    def mixer(self, u, position, rope, mask, cache):
        heads = (*u.shape[:2], -1, self.shape.linear_head_dim)
        qkv, z = self.attn_qkv(u), self.attn_gate(u).view(heads)
        q, k, v = self.convolve(qkv, position, cache).split([self.key_dim, self.key_dim, self.value_dim], 2)
        with torch.autocast(u.device.type, enabled=False):
            q = unit(q.float().view(heads)) * self.shape.linear_head_dim ** -0.5
            k, v = unit(k.float().view(heads)), v.float().reshape(heads)
            beta = torch.sigmoid(F.linear(u, self.ssm_beta.weight))
            dt = F.softplus(F.linear(u, self.ssm_alpha.weight) + self.ssm_dt.bias)
            g = torch.where(position[..., None] == 0, RESET, -self.ssm_log_a.exp() * dt)
            if u.shape[1] == 1:
                o, state = recurrent_delta_rule(q, k, v, g, beta, cache["state"])
            else:
                o, state = chunked_delta_rule(q, k, v, g, beta)
        if cache is not None:
            cache["state"] = state
        return self.ssm_out((self.ssm_norm(o) * F.silu(z)).flatten(2))

    def convolve(self, qkv, position, cache):
        """SiLU of the causal depthwise convolution; the last tap is on the current token."""
        width = self.shape.conv_width
        before = qkv.new_zeros(len(qkv), width - 1, qkv.shape[2])
        if cache is not None:
            before = cache.get("conv", before) if qkv.shape[1] == 1 else before
            cache["conv"] = torch.cat([before, qkv], 1)[:, 1 - width:]
        padded, y = torch.cat([before, qkv], 1), 0
        for back in range(width):
            tap = self.ssm_conv1d.weight[:, width - 1 - back]
            x = padded[:, width - 1 - back:padded.shape[1] - back]
            y = y + torch.where(position[..., None] >= back, x * tap, 0)
        return F.silu(y)


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class AttentionBlock(Block):
    """Attention with normalised queries and keys, partial rotary and an output gate."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.attn_q = linear(shape.hidden, 2 * shape.n_heads * shape.head_dim)  # per head: query, gate
        self.attn_k = linear(shape.hidden, shape.n_kv_heads * shape.head_dim)
        self.attn_v = linear(shape.hidden, shape.n_kv_heads * shape.head_dim)
        self.attn_q_norm = Norm(shape.head_dim, shape.norm_eps)
        self.attn_k_norm = Norm(shape.head_dim, shape.norm_eps)
        self.attn_output = linear(shape.n_heads * shape.head_dim, shape.hidden)

    def mixer(self, u, position, rope, mask, cache):
        heads = (*u.shape[:2], -1, self.shape.head_dim)
        q, gate = self.attn_q(u).view(*heads[:3], 2 * self.shape.head_dim).chunk(2, 3)
        k, v = self.attn_k(u).view(heads), self.attn_v(u).view(heads)
        q, k = (rotate(norm(x), rope, self.shape).to(v.dtype)
                for x, norm in ((q, self.attn_q_norm), (k, self.attn_k_norm)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            if u.shape[1] == 1:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        o = attend(q, k, v, mask).transpose(1, 2)
        return self.attn_output((o * torch.sigmoid(gate)).flatten(2))


def rotate(x: Tensor, rope: Tensor, shape: Shape) -> Tensor:
    """Rotary embedding of x [B, T, heads, head_dim], pairs (i, i + rope_dim / 2) of each head. Frequency i turns by the
    position in time, height or width where i modulo 3 is 0, 1 or 2: of 32 frequencies the sections 11, 11 and 10."""
    half = shape.rope_dim // 2
    number = torch.arange(half, device=x.device)
    frequency = shape.rope_base ** (-number.float() / half)
    angle = (rope[:, number % 3].float() * frequency[:, None]).transpose(1, 2)
    turned, rest = x.split([2 * half, x.shape[3] - 2 * half], 3)
    return torch.cat([turn(turned, angle), rest], 3)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair (i, i + d / 2) of x [B, T, heads, d] turned by angle i of [B, T, d / 2]."""
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    a, b = x.chunk(2, 3)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 3)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Softmax attention, scale head_dim^-1/2; q [B, heads, T, d], k, v [B, kv heads, T', d]; mask: true where
    a query sees a key, bool [B, 1, T, T'], or a BlockMask, which is faster on a GPU and only there."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def dense_mask(position: Tensor) -> Tensor:
    """bool [B, 1, T, T]: a token sees itself and what is before it in its document."""
    at = torch.arange(position.shape[1], device=position.device)
    return ((at <= at[:, None]) & (at >= (at - position)[..., None]))[:, None]


def block_mask(position: Tensor) -> BlockMask:
    """The same for `flex_attention`."""
    at = torch.arange(position.shape[1], device=position.device)
    return block_mask_of(at - position, at.expand_as(position))


def block_mask_of(first: Tensor, last: Tensor) -> BlockMask:
    """Query i of row b sees the keys first[b, i] to last[b, i]. first, last [B, T]: neither falls along a row, and T is
    a multiple of MASK_BLOCK. So the first and the last query of a block tell which blocks of keys its queries see, and
    which of them wholly. (PyTorch's own `create_block_mask` looks at T x T places, or compiles for a minute.)"""
    begin = torch.arange(0, first.shape[1], MASK_BLOCK, device=first.device)
    end = begin + MASK_BLOCK - 1
    from_first, to_first = (each[:, ::MASK_BLOCK, None] for each in (first, last))
    from_last, to_last = (each[:, MASK_BLOCK - 1::MASK_BLOCK, None] for each in (first, last))
    seen = (end >= from_first) & (begin <= to_last)         # [B, blocks of queries, blocks of keys]
    whole = (begin >= from_last) & (end <= to_first)

    def sees(b, h, i, j):
        return (j >= first[b, i]) & (j <= last[b, i])

    def listed(blocks):
        """(how many, which ones first) of each block of queries; all heads share them."""
        order = blocks.int().argsort(stable=True, dim=2, descending=True)
        return (each[:, None].int() for each in (blocks.sum(2), order))
    return BlockMask.from_kv_blocks(*listed(seen & ~whole), *listed(whole), BLOCK_SIZE=MASK_BLOCK, mask_mod=sees,
                                    seq_lengths=(first.shape[1],) * 2)


# ---- the network ---------------------------------------------------------------------------------------


class Network(nn.Module):
    """The trunk and one MTP block, which predicts one token further from the trunk's last hidden state."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.hidden)
        self.output = self.token_embd if shape.tied else linear(shape.hidden, shape.n_vocab)
        self.output_norm = Norm(shape.hidden, shape.norm_eps)
        kinds = [AttentionBlock if shape.is_attention(i) else LinearBlock for i in range(shape.n_layers)]
        self.blk = nn.ModuleList(kind(shape) for kind in [*kinds, AttentionBlock])
        self.blk[-1].nextn = nn.ModuleDict({
            "eh_proj": linear(2 * shape.hidden, shape.hidden),
            **{name: Norm(shape.hidden, shape.norm_eps) for name in ("enorm", "hnorm", "shared_head_norm")}})
        self.head_loss = _head_loss
        self.initialize()

    @torch.no_grad()
    def initialize(self):
        """Small embeddings, a layer's inputs by fan-in, its outputs zero: at first it is the identity."""
        for name, parameter in self.named_parameters():
            if name.endswith(("ffn_down.weight", "ssm_out.weight", "attn_output.weight")):
                parameter.zero_()
            elif name.startswith(("token_embd", "output.")):
                parameter.normal_(std=0.02)
            elif name.endswith("ssm_log_a"):
                parameter.zero_()
            elif name.endswith("ssm_dt.bias"):  # softplus of it: the heads forget over 10 to 1,000 tokens
                parameter.copy_(torch.logspace(-1, -3, len(parameter)).expm1().log())
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)

    def load_parameters(self, parameters: dict[str, Tensor]):
        """Take over all parameters, by name; a tied head's table counts once."""
        tied = {"output.weight": parameters["token_embd.weight"]} if self.shape.tied else {}
        self.load_state_dict(parameters | tied)

    @property
    def trunk(self):
        return self.blk[:self.shape.n_layers]

    def hidden(self, ids, position, mask, caches=None, seen: Seen | None = None) -> Tensor:
        """The trunk's normed hidden states float32 [B, T, hidden] of token ids [B, T]."""
        x = self.token_embd(ids)
        if seen is not None:
            x = x.flatten(0, 1).index_copy(0, seen.places, seen.rows.to(x.dtype)).view_as(x)
        rope = rotary_positions(position, seen)
        for i, block in enumerate(self.trunk):
            x = block(x, position, rope, mask, None if caches is None else caches[i])
        return self.output_norm(x)

    def draft_hidden(self, ids, position, mask, hidden, seen: Seen | None = None) -> Tensor:
        """The MTP block's normed hidden states: slot t sees token t and the trunk's hidden state of t - 1
        (zeros at a document's start), and like the trunk's slot t it predicts token t + 1. Of a picture it sees the
        embedding of its tokens, as qengine's draft block does."""
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1] * (position != 0)[..., None]
        nextn = self.blk[-1].nextn
        y = nextn["eh_proj"](torch.cat([nextn["enorm"](self.token_embd(ids)), nextn["hnorm"](before)], 2))
        return nextn["shared_head_norm"](self.blk[-1](y.float(), position, rotary_positions(position, seen), mask))

    def logits(self, hidden) -> Tensor:
        return F.linear(hidden, self.output.weight)

    def losses(self, hidden, targets) -> Tensor:
        """Cross entropy float32 [B, T] of the target ids [B, T]. Logits exist for a few tokens at a time."""
        checkpoint = torch.utils.checkpoint.checkpoint
        parts = zip(hidden.flatten(0, 1).split(HEAD_TOKENS), targets.flatten().split(HEAD_TOKENS))
        losses = [checkpoint(self.head_loss, h, self.output.weight, t, use_reentrant=False) for h, t in parts]
        return torch.cat(losses).view_as(targets)

    def forward(self, ids, position, targets, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        """The trunk's and the MTP block's losses [B, T] of predicting the targets [B, T], the next tokens."""
        mask = block_mask(position) if ids.is_cuda else dense_mask(position)
        hidden = self.hidden(ids, position, mask, seen=seen)
        draft = self.draft_hidden(ids, position, mask, hidden, seen)
        return self.losses(hidden, targets), self.losses(draft, targets)


def rotary_positions(position: Tensor, seen: Seen | None) -> Tensor:
    """[B, 3, T]: without pictures the position [B, T] on all axes."""
    return position[:, None].expand(-1, 3, -1) if seen is None else seen.rope


def _head_loss(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")
