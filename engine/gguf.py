"""GGUF model files: metadata, tensor table, and the tensors' bytes, checked before use.

A model is one file, or several that are named by their numbers: model-00001-of-00004.gguf.
"""

import contextlib
import dataclasses
import math
import mmap
import os
import re
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.reading import read_into
from engine.request import ModelError
from kernels.formats import FLOATS, FORMATS, GGML_TYPES, dequantize

# The types that a matrix may have, as messages list them; a vector is of one of FLOATS.
SUPPORTED_TYPES = (*FORMATS, *sorted(FLOATS, key=lambda name: FLOATS[name].file_bytes))

# GGUF metadata: type number -> struct format. 7 is bool, 8 string, 9 array.
GGUF_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
GGUF_BOOL, GGUF_STRING, GGUF_ARRAY = 7, 8, 9
MAX_KEY_BYTES = 65535  # the longest key that the GGUF specification allows

# The name of one part of a model: what all parts have in common, the part's number from 1 on, and how many there are.
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
OF_ONE_PART = {"split.no", "general.alignment"}     # keys in which the parts of a model may differ


@dataclass(frozen=True)
class TensorInfo:
    """One row of a GGUF tensor table."""

    name: str
    shape: tuple[int, ...]  # row-major: (rows, columns); GGUF stores the reverse
    type: str               # "Q8_0", "F32", ...
    offset: int             # bytes from the start of the file
    nbytes: int


class _Cursor:
    """Reads little-endian values from `data` one after the other and never past its end."""

    def __init__(self, data: memoryview, path: str):
        self.data, self.path, self.at = data, path, 0

    def fail(self, message: str, at: int | None = None):
        raise ModelError(f"{self.path}: {message} (byte {self.at if at is None else at})")

    def skip(self, n: int, what: str) -> int:
        """Step over n bytes; returns where they start."""
        start, left = self.at, len(self.data) - self.at
        if n > left:
            self.fail(f"the file ends early: {what} needs {n} bytes and {left} are left")
        self.at += n
        return start

    def number(self, format: str, what: str):
        return struct.unpack_from(format, self.data, self.skip(struct.calcsize(format), what))[0]

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", f"the length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, more than {limit}")
        start = self.skip(length, what)
        try:
            return str(self.data[start:self.at], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8 text", start)

    def value(self, kind: int, what: str):
        """A metadata value: int, float, bool, str, list of str, or NumPy array (of numbers or bools)."""
        if kind == GGUF_STRING:
            return self.string(what)
        if kind == GGUF_ARRAY:
            return self.array(what)
        if kind == GGUF_BOOL:
            byte = self.number("<B", what)
            if byte > 1:
                self.fail(f"{what} is a truth value but holds {byte}", self.at - 1)
            return byte == 1
        if kind not in GGUF_NUMBERS:
            self.fail(f"{what} has the unknown value type {kind}")
        return self.number(GGUF_NUMBERS[kind], what)

    def array(self, what: str):
        kind = self.number("<I", f"the element type of {what}")
        count = self.number("<Q", f"the length of {what}")
        if kind == GGUF_STRING:
            return self.strings(count, what)
        if kind != GGUF_BOOL and kind not in GGUF_NUMBERS:
            self.fail(f"{what} is an array of the unsupported value type {kind}")
        dtype = np.dtype("u1" if kind == GGUF_BOOL else GGUF_NUMBERS[kind])
        start = self.skip(count * dtype.itemsize, what)
        array = np.frombuffer(self.data[start:self.at], dtype).copy()   # what is mapped may be lost later
        if kind != GGUF_BOOL:
            return array
        if array.size and array.max() > 1:
            self.fail(f"{what} holds truth values other than 0 and 1", start)
        return array.astype(bool)

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings. A vocabulary has 250,000 of them, so this loop is written for speed."""
        if count * 8 > len(self.data) - self.at:
            self.fail(f"the file ends early: {what} claims {count} strings")
        data, at, end, found, length = self.data, self.at, len(self.data), [], struct.Struct("<Q")
        try:
            for _ in range(count):
                stop = at + 8 + length.unpack_from(data, at)[0]
                if stop > end:
                    self.fail(f"the file ends early: string {len(found)} of {what} goes past the end", at)
                found.append(str(data[at + 8:stop], "utf-8"))
                at = stop
        except struct.error:
            self.fail(f"the file ends early: string {len(found)} of {what} has no length", at)
        except UnicodeDecodeError:
            self.fail(f"string {len(found)} of {what} is not UTF-8 text", at)
        self.at = at
        return found


REQUIRED = object()


class Keys:
    """The metadata of `path`: key -> int, float, bool, str, list of str, or NumPy array (of numbers or bools)."""

    path: str
    metadata: dict

    def get(self, key: str, kind: type, default=REQUIRED):
        """metadata[key], which must be of the Python type `kind` (NumPy arrays: np.ndarray)."""
        if key not in self.metadata:
            if default is REQUIRED:
                raise ModelError(f"{self.path}: key '{key}' is missing")
            return default
        value = self.metadata[key]
        if type(value) is not kind:
            raise ModelError(f"{self.path}: key '{key}' holds {type(value).__name__}, not {kind.__name__}")
        return value

    def get_array(self, key: str, kinds: str, default=REQUIRED):
        """metadata[key], an array of numbers whose NumPy kind is one of `kinds` ("iu" integers, "f", "b")."""
        array = self.get(key, np.ndarray, default)
        if array is not default and array.dtype.kind not in kinds:
            raise ModelError(f"{self.path}: key '{key}' is an array of the wrong type, {array.dtype}")
        return array


class File(Keys):
    """One GGUF file (version 2 or 3, little-endian), checked before use.

    tensors    name -> TensorInfo
    bytes      the whole file, mapped into memory: for the header. Tensors are read (engine/reading.py), since the file
               may be cut meanwhile

    header: an open file in place of the one at `path`, which has nothing behind its header (engine/hub.py). Its tensors
    are not read. header_bytes: the header must end within so many bytes; None: within the file.

    Counts and lengths are compared with the bytes that are left before anything is allocated, so that a
    damaged file ends in a `ModelError` at once. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    def __init__(self, path: str | Path, header: BinaryIO | None = None, header_bytes: int | None = None):
        self.path, self.is_header = str(path), header is not None
        self.metadata: dict = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.bytes = self._map(header)
        cursor = _Cursor(self.bytes[:header_bytes], self.path)
        n_tensors, n_keys = self._read_header(cursor)
        for _ in range(n_keys):
            self._read_key(cursor)
        rows = [self._read_tensor(cursor) for _ in range(n_tensors)]
        self._place(rows, cursor)

    def _map(self, header: BinaryIO | None) -> memoryview:
        try:
            with contextlib.nullcontext(header) if header else open(self.path, "rb") as file:
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            return memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be opened: {error.strerror}") from None
        except ValueError:  # mmap's word for an empty file
            raise ModelError(f"{self.path}: the file is empty") from None

    def read(self, name: str, start: int, into: np.ndarray):
        """Fills `into`, uint8, with the bytes of a tensor from `start` on. Raises ModelError if the file has been cut
        since it was opened, if the disk fails, or if the file has only its header."""
        tensor = self.tensors[name]
        if self.is_header:
            raise ModelError(f"{self.path}: tensor '{name}' cannot be read: only the header of this file was fetched")
        try:
            read_into(self._file, tensor.offset + start, into)
        except EOFError:
            raise ModelError(f"{self.path}: tensor '{name}' ends at byte {tensor.offset + tensor.nbytes}, and the file "
                             f"now has {os.fstat(self._file).st_size} bytes: it has become shorter since it was "
                             "opened") from None
        except OSError as error:
            raise ModelError(f"{self.path}: tensor '{name}' cannot be read: {error.strerror}") from None

    def _read_header(self, cursor: _Cursor) -> tuple[int, int]:
        start = cursor.skip(4, "the magic number")
        if self.bytes[start:cursor.at] != b"GGUF":
            cursor.fail("not a GGUF file: it does not begin with the letters GGUF", 0)
        version = cursor.number("<I", "the version")
        if version not in (2, 3):
            big_endian = ", and seems to be byte-swapped (big-endian)" if version & 0xFFFF == 0 else ""
            cursor.fail(f"GGUF version {version} is not 2 or 3{big_endian}", 4)
        n_tensors = cursor.number("<Q", "the tensor count")
        n_keys = cursor.number("<Q", "the key count")
        least = n_tensors * 32 + n_keys * 13  # the smallest table rows there can be
        if least > len(cursor.data) - cursor.at:
            cursor.fail(f"the file ends early: it claims {n_tensors} tensors and {n_keys} keys", 8)
        return n_tensors, n_keys

    def _read_key(self, cursor: _Cursor):
        at = cursor.at
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if key in self.metadata:
            cursor.fail(f"key {key[:80]!r} appears twice", at)
        what = f"key {key[:80]!r}"
        self.metadata[key] = cursor.value(cursor.number("<I", f"the type of {what}"), what)

    def _read_tensor(self, cursor: _Cursor) -> tuple[TensorInfo, int]:
        """Returns (a row of the tensor table, whose offset is still relative to the data; the row's own position)."""
        at = cursor.at
        name = cursor.string("a tensor name", MAX_KEY_BYTES)
        what = f"tensor {name[:80]!r}"
        n_dims = cursor.number("<I", f"the number of dimensions of {what}")
        if not 1 <= n_dims <= 4:
            cursor.fail(f"{what} has {n_dims} dimensions, not 1 to 4", at)
        dims = [cursor.number("<Q", f"a dimension of {what}") for _ in range(n_dims)]
        number = cursor.number("<I", f"the type of {what}")
        offset = cursor.number("<Q", f"the offset of {what}")
        if min(dims) < 1:
            cursor.fail(f"{what} has a dimension of zero", at)
        if number not in GGML_TYPES:
            cursor.fail(f"{what} has the unknown type number {number}", at)
        type, block, block_bytes = GGML_TYPES[number]
        if dims[0] % block:
            cursor.fail(f"{what} has rows of {dims[0]} weights, not a multiple of {type}'s {block}", at)
        nbytes = math.prod(dims) // block * block_bytes  # Python integers: no product wraps
        return TensorInfo(name, tuple(reversed(dims)), type, offset, nbytes), at

    def _place(self, rows: list, cursor: _Cursor):
        """Turn offsets into file positions. Checks that every tensor is aligned, inside the file and overlaps no
        other."""
        alignment = self.get("general.alignment", int, 32)
        if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise ModelError(f"{self.path}: key 'general.alignment' is {alignment}, not a power of two >= 8")
        start = -(-cursor.at // alignment) * alignment
        end = len(self.bytes)
        used = start
        for tensor, at in sorted(rows, key=lambda row: row[0].offset):
            what, position = f"tensor {tensor.name[:80]!r}", start + tensor.offset
            if tensor.name in self.tensors:
                cursor.fail(f"{what} appears twice", at)
            if tensor.offset % alignment:
                cursor.fail(f"{what} starts at offset {tensor.offset}, not a multiple of {alignment}", at)
            if position < used:
                cursor.fail(f"{what} overlaps the tensor before it", at)
            used = position + tensor.nbytes
            if used > end:
                cursor.fail(f"{what} ends at byte {used}, past the end of the file at {end}", at)
            self.tensors[tensor.name] = dataclasses.replace(tensor, offset=position)


class Headers(str):
    """Stands for the path of a model of which the headers of its files are open, and nothing else is there. files: name
    -> File; the first is the one that it names."""

    files: dict[str, File]

    @classmethod
    def of(cls, files: dict[str, File]) -> "Headers":
        headers = cls(next(iter(files)))
        headers.files = files
        return headers


class GGUF(Keys):
    """A model: a GGUF file, or several that hold its tensors together, of which the first has the metadata.

    files      every File of the model, in the order of their numbers
    tensors    name -> TensorInfo, of all files
    data(name) the tensor's bytes as stored; floats(name) its values; read(name, start, into) some of its bytes

    path: of the file, or of any part. The other parts lie beside it. Or Headers.
    """

    def __init__(self, path: str | Path):
        opened = path.files if isinstance(path, Headers) else {str(path): File(path)}
        is_there = opened.__contains__ if isinstance(path, Headers) else os.path.exists
        self.files = [opened.get(part) or File(part) for part in part_paths(opened[str(path)], is_there)]
        if len(self.files) > 1:
            check_parts(self.files)
        self.path, self.metadata = self.files[0].path, self.files[0].metadata
        self.tensors = {name: tensor for file in self.files for name, tensor in file.tensors.items()}
        self.file_of = {name: file for file in self.files for name in file.tensors}

    @property
    def stem(self) -> str:
        """The file's name without ".gguf" and without the number of a part."""
        part = PART_NAME.fullmatch(self.path) if len(self.files) > 1 else None
        return Path(self.path).stem if part is None else Path(part[1]).name

    def read(self, name: str, start: int, into: np.ndarray):
        """See `File.read`."""
        self.file_of[name].read(name, start, into)

    def data(self, name: str) -> np.ndarray:
        """The tensor as stored: one of FLOATS in its dtype and the tensor's shape (BF16 as uint16), one of FORMATS as
        uint8 [rows, bytes of a row], any other type as flat uint8."""
        tensor = self.tensors[name]
        raw = np.empty(tensor.nbytes, np.uint8)
        self.read(name, 0, raw)
        if tensor.type in FLOATS:
            return raw.view(FLOATS[tensor.type].dtype).reshape(tensor.shape)
        return raw.reshape(*tensor.shape[:-1], -1) if tensor.type in FORMATS else raw

    def floats(self, name: str) -> np.ndarray:
        """The tensor's values as float32 in its shape, all of them finite."""
        tensor, data = self.tensors[name], self.data(name)
        if tensor.type in FORMATS:
            with np.errstate(invalid="ignore"):  # infinite times zero
                values = dequantize(FORMATS[tensor.type], data).reshape(tensor.shape)
        elif tensor.type in FLOATS:
            values = FLOATS[tensor.type].widen(data)
        else:
            raise ModelError(f"{self.file_of[name].path}: tensor '{name}' is of the unsupported type {tensor.type}")
        if not np.isfinite(values).all():
            raise ModelError(f"{self.file_of[name].path}: tensor '{name}' holds a value that is not a finite number")
        return values


def part_paths(file: File, is_there: Callable[[str], bool]) -> list[str]:
    """The paths of all files of the model that `file` is a part of. Raises ModelError where some are missing."""
    n = file.get("split.count", int, 1)
    if n <= 1:
        return [file.path]
    number, named = file.get("split.no", int) + 1, PART_NAME.fullmatch(file.path)
    if named is None or (int(named[2]), int(named[3])) != (number, n):
        raise ModelError(f"{file.path}: the file is part {number} of {n}, so its name must end in "
                         f"-{number:05}-of-{n:05}.gguf, and the other parts must lie beside it")
    paths = [f"{named[1]}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
    if missing := [os.path.basename(path) for path in paths if not is_there(path)]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(f"{file.path}: the model has {n} parts, and beside this one there is no "
                         f"{', '.join(missing[:3])}{more}")
    return paths


def same_value(a, b) -> bool:
    """Whether two metadata values are equal. A list of strings must not become an array: each of its strings would take
    as many bytes as the longest."""
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else (
        type(a) is type(b) and a == b)


def check_parts(files: list[File]):
    """Raises ModelError where files with the right names are not the parts of one model."""
    first, holder = files[0], {}
    for index, file in enumerate(files):
        for key, value in ("split.no", index), ("split.count", len(files)):
            if (said := file.get(key, int)) != value:
                raise ModelError(f"{file.path}: key '{key}' is {said}, and by the file's name it is {value}")
        for key in sorted(file.metadata.keys() & first.metadata.keys() - OF_ONE_PART):
            if not same_value(file.metadata[key], first.metadata[key]):
                raise ModelError(f"{file.path}: key '{key[:80]}' is not what it is in {first.path}: these are parts of "
                                 "different models")
        for name in file.tensors:
            if name in holder:
                raise ModelError(f"{file.path}: tensor {name[:80]!r} is also in {holder[name].path}")
            holder[name] = file
    if (said := first.get("split.tensors.count", int)) != len(holder):
        raise ModelError(f"{first.path}: key 'split.tensors.count' is {said}, and the {len(files)} parts have "
                         f"{len(holder)} tensors")
