"""Text to token ids and back, with the vocabulary of a model file."""

import codecs
import contextlib
import ctypes
import math
import struct
import threading

import numpy as np
import sentencepiece
import tokenizers

from engine.gguf import GGUF
from engine.guard import GUARD, any_of
from engine.request import ContextExceeded, ModelError, RequestError

# Token types of GGUF, the same numbers as SentencePiece's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# How text is cut before byte pairs are merged; the two differ in whether combining marks belong to words.
# From llama.cpp's src/llama-vocab.cpp. Text is taken as it comes: no Unicode normalisation (NFC), as there.
_WORD = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?%s+|\p{N}"
_REST = r" ?[^\s%s\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "qwen2": _WORD % r"\p{L}" + "|" + _REST % r"\p{L}",
    "qwen35": _WORD % r"[\p{L}\p{M}]" + "|" + _REST % r"\p{L}\p{M}",
}

# Tokens that end a turn in every file that has them, whether or not its metadata says so.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

LONG = 1 << 16              # letters from which on a text costs much memory while it is encoded, 200 bytes a letter


class Tokenizer:
    """Text to token ids and back. Subclasses say how plain text is cut into tokens.

    n_vocab       number of tokens
    pieces        list of bytes: what each token stands for
    control       name -> id of the control tokens
    tags          name -> id of the tags that are one token each: <think>, </tool_call>, ...
    eos_ids       the tokens that end an answer
    max_token_bytes  the most bytes of text that one token stands for
    prefix, suffix   tokens that the file wants around a text (`encode(ends=True)`), mostly none

    Control tokens (<|im_end|>, ...) are matched in text only where `allow_special` is true, and are left out of decoded
    text unless `special` is true. Tags such as <think> are ordinary tokens in both directions (not for grammars:
    engine/constraints.py).
    """

    leading_space = False  # whether encoding adds a space in front of the text, and decoding removes it

    def __init__(self, pieces: list[bytes], control: dict[str, int], tags: dict[str, int], eos_ids, prefix=(),
                 suffix=()):
        self.pieces, self.n_vocab = pieces, len(pieces)
        self.eos_ids, self.prefix, self.suffix = frozenset(eos_ids), list(prefix), list(suffix)
        self.control, self.tags = control, tags
        self.max_token_bytes = max(map(len, [*pieces, *map(str.encode, control)]))
        self._control_pattern = any_of(control)
        hidden = set(control.values())
        self._shown = [b"" if i in hidden else piece for i, piece in enumerate(pieces)]

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def encode(self, text: str, allow_special: bool = True, ends: bool = False) -> list[int]:
        """Token ids of a text. With allow_special=False a control token in it is spelt out as text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("prompt", "the prompt holds half of a surrogate pair") from None
        parts = self._control_pattern.split(text) if allow_special else [text]
        plain = self._encode_plain([part.replace(GUARD, "") for part in parts[::2]])
        ids = plain[0]
        for name, more in zip(parts[1::2], plain[1:], strict=True):
            ids += [self.control[name], *more]
        return self.prefix + ids + self.suffix if ends else ids

    def decode(self, ids, special: bool = False) -> str:
        """The text of a whole sequence of ids; bytes that are not UTF-8 become the replacement character."""
        bad = next((i for i in ids if not 0 <= i < self.n_vocab), None)
        if bad is not None:
            raise RequestError("prompt", f"token id {bad} is outside 0 .. {self.n_vocab - 1}")
        text = self.bytes_of(ids, special).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.leading_space else text

    def bytes_of(self, ids, special: bool = False) -> bytes:
        """The text of ids in UTF-8; one of several tokens of a character gives only some of its bytes."""
        table = self.pieces if special else self._shown
        return b"".join(table[i] for i in ids)

    def stream_decoder(self, special: bool = False) -> "StreamDecoder":
        """special: whether control tokens have a text."""
        return StreamDecoder(self.pieces if special else self._shown)


class StreamDecoder:
    """Text from one token after another: a character split over tokens comes with its last byte.

    Unlike `Tokenizer.decode` it keeps a leading space, which separates the prompt from its continuation.
    """

    def __init__(self, pieces: list[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """What is left at the end: the replacement character for a character that was begun, else nothing."""
        return self._decoder.decode(b"", True)


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding (GGUF model "gpt2"), through the `tokenizers` library."""

    def __init__(self, gguf: GGUF):
        pattern = PRE_TOKENIZERS.get(pre := gguf.get("tokenizer.ggml.pre", str))
        if pattern is None:
            raise ModelError(f"{gguf.path}: pre-tokenizer {pre[:80]!r} is not supported, "
                             f"{' and '.join(PRE_TOKENIZERS)} are")
        tokens, types = _read_tokens(gguf)
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            raise ModelError(f"{gguf.path}: key 'tokenizer.ggml.tokens' has the same token twice")
        merges = _read_merges(gguf, ids)
        self._long_text = OneAtATime()
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        self._tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False)
                                    for token, type in zip(tokens, types) if type == USER_DEFINED and token])
        to_byte = str.maketrans({char: chr(byte) for byte, char in enumerate(BYTE_ALPHABET)})
        pieces = [_byte_level_piece(token, to_byte) if type == NORMAL else token.encode()
                  for token, type in zip(tokens, types)]
        super().__init__(pieces, **_special_tokens(gguf, tokens, types))

    def _encode_plain(self, texts):
        with self._long_text if sum(map(len, texts)) > LONG else contextlib.nullcontext():
            # The batch call, also for one text: it releases the interpreter lock, `encode` does not.
            return [encoding.ids for encoding
                    in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


class OneAtATime:
    """For what takes much memory for a short time: long texts here, large grammars in engine/constraints.py. They take
    turns, and after each turn the free memory goes back to the system: the C library would keep it, hundreds of
    megabytes."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        with contextlib.suppress(AttributeError):       # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1),
                 *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


BYTE_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str, to_byte: dict) -> bytes:
    try:
        return token.translate(to_byte).encode("latin-1")
    except UnicodeEncodeError:  # a token outside the byte alphabet, which no text reaches: padding
        return token.encode()


def _read_tokens(gguf: GGUF) -> tuple[list[str], list[int]]:
    """The vocabulary and each token's type."""
    tokens = gguf.get("tokenizer.ggml.tokens", list)
    types = gguf.get_array("tokenizer.ggml.token_type", "iu")
    if len(types) != len(tokens):
        raise ModelError(f"{gguf.path}: there are {len(tokens)} tokens and {len(types)} token types")
    return tokens, types.tolist()


def _read_merges(gguf: GGUF, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The byte-pair merges, best first; all their tokens, and every byte, must be in the vocabulary."""
    merges = []
    for i, merge in enumerate(gguf.get("tokenizer.ggml.merges", list)):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"{gguf.path}: merge {i} of key 'tokenizer.ggml.merges' is of unknown tokens")
        merges.append((left, right))
    missing = next((byte for byte, char in enumerate(BYTE_ALPHABET) if char not in ids), None)
    if missing is not None:
        raise ModelError(f"{gguf.path}: the vocabulary has no token for byte {missing}")
    return merges


def _special_tokens(gguf: GGUF, tokens: list[str], types: list[int]) -> dict:
    """The arguments of `Tokenizer` that the metadata decides: control, tags, eos_ids, prefix, suffix."""
    def token_id(role: str):
        key = f"tokenizer.ggml.{role}_token_id"
        value = gguf.get(key, int, None)
        if value is not None and not 0 <= value < len(tokens):
            raise ModelError(f"{gguf.path}: key '{key}' is {value}, outside the vocabulary")
        return value

    control, tags = ({token: i for i, (token, type) in enumerate(zip(tokens, types)) if type == kind and token}
                     for kind in (CONTROL, USER_DEFINED))
    ends = {token_id("eos"), token_id("eot"), *(control.get(name) for name in END_TOKENS)} - {None}
    if not ends:
        raise ModelError(f"{gguf.path}: no token ends a text: key 'tokenizer.ggml.eos_token_id' is missing")
    around = {}
    for where, role in (("prefix", "bos"), ("suffix", "eos")):
        token = token_id(role)
        wanted = gguf.get(f"tokenizer.ggml.add_{role}_token", bool, False) and token is not None
        around[where] = [token] if wanted else []
    return {"control": control, "tags": tags, "eos_ids": ends, **around}


class SPMTokenizer(Tokenizer):
    """SentencePiece vocabulary (GGUF model "llama"): the library's own model file, written from the metadata.

    Field numbers: github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
    """

    def __init__(self, gguf: GGUF):
        tokens, types = _read_tokens(gguf)
        scores = gguf.get_array("tokenizer.ggml.scores", "f").astype(np.float32)
        if len(scores) != len(tokens):
            raise ModelError(f"{gguf.path}: there are {len(tokens)} tokens and {len(scores)} token scores")
        self.leading_space = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
        model = b"".join(
            _proto_bytes(1, _proto_bytes(1, token.encode()) + _proto_float(2, score) + _proto_number(3, type))
            for token, score, type in zip(tokens, scores.tolist(), types))
        trainer = _proto_number(3, 2) + _proto_number(35, BYTE in types)  # model_type BPE, byte_fallback
        normalizer = (_proto_bytes(1, b"identity") + _proto_number(3, self.leading_space)
                      + _proto_number(4, False))  # name, add_dummy_prefix, remove_extra_whitespaces
        try:
            self._processor = sentencepiece.SentencePieceProcessor(
                model_proto=model + _proto_bytes(2, trainer) + _proto_bytes(3, normalizer))
        except RuntimeError as error:
            raise ModelError(f"{gguf.path}: not a SentencePiece vocabulary: {error}") from None
        pieces = [BYTE_PIECES[token] if type == BYTE else token.replace("\u2581", " ").encode()
                  for token, type in zip(tokens, types)]
        super().__init__(pieces, **_special_tokens(gguf, tokens, types))
        if BYTE not in types:               # one unknown token stands for any number of unknown letters
            self.max_token_bytes = math.inf

    def _encode_plain(self, texts):
        return self._processor.encode(texts)


# The names of SentencePiece's byte tokens; the library accepts no others.
BYTE_PIECES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def _varint(value: int) -> bytes:
    """Protocol buffers' integer: seven bits a byte, the lowest first; negative ones as 64-bit."""
    value &= (1 << 64) - 1
    low = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])


def _proto_number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _proto_float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _proto_bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


class ByteTokenizer(Tokenizer):
    """For models without a vocabulary: token i < 256 is byte i, 256 ends a text, and 257 stands for a token of a
    picture. The tokens after these, which are most of what random weights produce, are shown as <number>."""

    EOS, IMAGE_PAD = 256, 257

    def __init__(self, n_vocab: int):
        pieces = [bytes([i]) for i in range(256)] + [b"<%d>" % i for i in range(256, n_vocab)]
        super().__init__(pieces, {"<|endoftext|>": self.EOS, "<|image_pad|>": self.IMAGE_PAD}, {}, [self.EOS])

    def _encode_plain(self, texts):
        return [list(text.encode()) for text in texts]


def load_tokenizer(gguf: GGUF) -> Tokenizer:
    """The tokenizer that a model file describes."""
    kinds = {"gpt2": BPETokenizer, "llama": SPMTokenizer}
    model = gguf.get("tokenizer.ggml.model", str)
    if model not in kinds:
        raise ModelError(f"{gguf.path}: tokenizer {model[:80]!r} is not supported, "
                         f"{' and '.join(kinds)} are")
    return kinds[model](gguf)


def encode_prompt(tokenizer: Tokenizer, text: str, n_ctx: int) -> list[int]:
    """Token ids of a prompt. Raises ContextExceeded before tokenising if the text has too many letters to fit."""
    n_letters = len(text) - text.count(GUARD)
    if n_letters > n_ctx * tokenizer.max_token_bytes:
        raise ContextExceeded(math.ceil(n_letters / tokenizer.max_token_bytes), n_ctx, is_exact=False)
    return tokenizer.encode(text)
