"""Everything that runs on a card, one operation per file, and the card itself, real or emulated.

Each file of an operation stands alone: mathematics, a NumPy reference, the kernel, its launch, a check. In the order in
which a token meets them:

    embedding.py                        rows of the token table
    norm.py, quantize.py                RMSNorm; activations to int8
    q8_gemm.py, tensor_gemm.py          matrix products of prompts, by dp4a and by tensor cores
    products.py                         which of the two is faster on a card
    q8_gemv.py, quant_gemv.py           matrix-vector products of decode steps, Q8_0 and packed formats
    decode_tile.py, decode_tensor.py    the same for many columns at once, by dp4a and by tensor cores
    float_matmul.py                     both, for weights that are stored as floats
    conv.py, gdn.py, gdn_decode.py      Gated DeltaNet: convolution, delta rule of prompts, of a decode step
    rope.py, attention.py               attention of prompts
    attend_decode.py, attend_codes.py   attention of a decode step; its scores where keys have 8 bits
    attend_staged.py                    the same with warps that do not wait for each other, for keys and values in few
                                        bits
    kv_cache.py, kv_formats.py          keys and values in pages
    kv_expand.py                        pages of few bits as halves, for prompts
    hadamard.py                         the rotation of keys and values before they are quantised
    checkpoint.py                       copies of recurrent states
    swiglu.py                           the activation of the MLP
    route.py                            a mixture of experts: which experts each row goes to, and their rows
    expert_gemm.py, expert_gemv.py      the products of experts, of prompts and in decode steps
    host_requests.py, host_experts.py   experts that this machine's processor computes beside the card: the card's
                                        side, the host's
    sample.py, logprobs.py              the next token of each row, log-probabilities
    accept.py                           which of these tokens an answer gains
    draft_input.py                      the inputs of the draft block
    draft_list.py, draft_head.py        logits of each slot's own list of tokens; the choice of a draft
    ngram.py                            drafts from the text so far
    advance.py                          chosen tokens and drafts become the inputs of the next step
    patches.py, patch_rope.py           pictures: their patches and positions
    half_gemm.py, layer_norm.py         products in half precision, LayerNorm
    picture_attention.py                attention within pictures
    formats/                            types of weights, on disk and on a card
    upload.py, finite.py, synthetic.py  loading: bytes of a file, a check for NaN, random weights
    operands.py, records.py             types of what kernels take: matrices, places, states
    limits.py                           options of kernels that users may choose

The machinery under them:

    card.py, open.py                    the Card interface; opening cards
    nvidia.py, emulated/                its two implementations
    intrinsics.py                       instructions that Numba does not offer
    compile.py, assembler.py, workers.py    Python to PTX to machine code, kept on disk
    quick_numba.py                      Numba's compiler, with less work done twice
    configured.py                       launches as Numba's users write them
    throttled.py                        replacements of throttled instructions
    probe.py, bench.py, trace.py        what a card can do; the table of a kernel's check; timelines
"""
