"""Models in several files: read as if they were one, and refused in one sentence where a part is missing or wrong."""

import functools
import random
import shutil

import gguf as reference
import numpy as np
import pytest

import qengine
from cli.main import main
from engine.gguf import GGUF, PART_NAME, File, same_value
from tests.models import CONTEXT, TINY, results
from tests.oracle import oracle_path
from tests.test_gguf import damage

VALUE = reference.GGUFValueType


def part(folder, number, n, stem="model"):
    return folder / f"{stem}-{number:05}-of-{n:05}.gguf"


@functools.cache
def read(source):
    """(the metadata as (key, value, type, type of elements), the tensors) of a file; the package is slow to read it."""
    reader = reference.GGUFReader(str(source))
    return [(key, field.contents(), field.types[0], field.types[-1] if field.types[0] == VALUE.ARRAY else None)
            for key, field in reader.fields.items() if not key.startswith("GGUF.")], reader.tensors


def write(writer):
    for step in writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close:
        step()


def split(source, folder, n, parts=None, changes=None):
    """Writes the model `source` as n files into `folder`, and returns their paths. parts: how many tensors each of
    them has, by default they come in turn. changes: {(number of a part from 1 on, key): its value; None leaves it out}.
    """
    keys, all_tensors = read(source)
    architecture = next(value for key, value, *_ in keys if key == "general.architecture")
    tensors = [all_tensors[i::n] for i in range(n)]
    if parts:
        tensors = [all_tensors[end - size:end] for end, size in zip(np.cumsum(parts), parts)]
    for i, some in enumerate(tensors):
        said = {"split.no": (i, VALUE.UINT16), "split.count": (n, VALUE.UINT16),
                "split.tensors.count": (len(all_tensors), VALUE.INT32)}
        said = {key: (value, *kinds) for key, value, *kinds in keys if i == 0} | said
        for (of, key), value in (changes or {}).items():
            if of == i + 1:
                said[key] = value, *said.get(key, (None, VALUE.STRING))[1:]
        said.pop("general.architecture", None)
        writer = reference.GGUFWriter(str(part(folder, i + 1, n)), architecture)
        for key, (value, *kinds) in said.items():
            if value is not None:
                writer.add_key_value(key, value, *kinds)
        for tensor in some:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        write(writer)
    return [part(folder, i, n) for i in range(1, n + 1)]


def same_as(model, source):
    """Asserts that both have the same metadata, but for the parts, and the same tensors."""
    source, keys = GGUF(source), {key: value for key, value in model.metadata.items() if not key.startswith("split.")}
    assert keys.keys() == source.metadata.keys()
    assert all(np.array_equal(keys[key], source.metadata[key]) for key in keys)
    assert model.tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        assert (model.tensors[name].shape, model.tensors[name].type) == (tensor.shape, tensor.type)
        assert np.array_equal(model.data(name).view(np.uint8), source.data(name).view(np.uint8))


@pytest.mark.parametrize("n, parts", [(2, None), (3, None), (4, [0, 1, 0, None])], ids=["2", "3", "empty parts"])
def test_a_model_in_parts_is_the_model(tmp_path, n, parts):
    n_tensors = len(GGUF(TINY).tensors)
    paths = split(TINY, tmp_path, n, parts and [n_tensors - 1 if size is None else size for size in parts])
    for path in paths:                          # whichever of them is named
        model = GGUF(path)
        same_as(model, TINY)
        assert [file.path for file in model.files] == [str(each) for each in paths] and model.path == str(paths[0])
        assert model.stem == "model"
    assert sum(len(file.bytes) for file in model.files) == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("name", ["dense_mtp-Q8_0", "dense_kq-Q4_K_M", "moe_mtp-Q8_0"])
def test_the_oracles_models_in_parts(tmp_path, name):
    source = oracle_path(f"gguf/{name}.gguf")
    same_as(GGUF(split(source, tmp_path, 3)[0]), source)


@pytest.mark.parametrize("small", [False, True])
def test_parts_as_the_gguf_package_writes_them(tmp_path, small):
    """small: the first part has the metadata alone."""
    keys, tensors = read(TINY)
    writer = reference.GGUFWriter(str(tmp_path / "m.gguf"), "qwen35", split_max_tensors=9, small_first_shard=small)
    for key, value, *kinds in keys:
        if key != "general.architecture":
            writer.add_key_value(key, value, *kinds)
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(writer)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > 2 and all(PART_NAME.fullmatch(str(path)) for path in paths)
    same_as(GGUF(paths[-1]), TINY)


def test_a_part_that_is_the_whole_model(tmp_path):
    """A file may be named like a part and be none, or be the only one."""
    path = tmp_path / "model-00002-of-00003.gguf"
    shutil.copyfile(TINY, path)
    same_as(GGUF(path), TINY)
    assert GGUF(path).stem == "model-00002-of-00003"
    only, = split(TINY, tmp_path, 1)
    same_as(GGUF(only), TINY)


def test_answers_of_a_model_in_parts(tmp_path, card):
    paths = split(TINY, tmp_path, 3)
    (logits, tokens), (expected, expected_tokens) = results(paths[1], card), results(TINY, card)
    assert np.array_equal(logits, expected) and tokens == expected_tokens


def test_a_plan_counts_all_parts(tmp_path, capsys):
    def plan(path):
        assert main(["-m", str(path), "--plan", "--card", "emulated", "--ctx", str(CONTEXT)]) == 0
        return capsys.readouterr().out

    assert plan(split(TINY, tmp_path, 3)[2]) == plan(TINY)


def test_a_model_without_a_name_is_named_without_a_number(tmp_path):
    paths = split(TINY, tmp_path, 2, changes={(1, "general.name"): None})
    assert qengine.Config.from_gguf(GGUF(paths[1])).name == "model"


def renamed(folder, number, to):
    part(folder, number, 3).rename(folder / to)


WRONG = {       # what is done to a model of three parts, which part is named then, and the sentence
    "a part is missing": (lambda at: part(at, 2, 3).unlink(), 1,
                          "has 3 parts, and beside this one there is no model-00002-of-00003.gguf"),
    "the first is missing": (lambda at: part(at, 1, 3).unlink(), 3, "there is no model-00001-of-00003.gguf"),
    "two are missing": (lambda at: (part(at, 1, 3).unlink(), part(at, 3, 3).unlink()), 2,
                        "there is no model-00001-of-00003.gguf, model-00003-of-00003.gguf"),
    "the named one is missing": (lambda at: part(at, 2, 3).unlink(), 2, "cannot be opened: No such file"),
    "one has another name": (lambda at: renamed(at, 2, "m.gguf"), "m.gguf",
                             "is part 2 of 3, so its name must end in -00002-of-00003.gguf"),
    "one has another number": (lambda at: shutil.copyfile(part(at, 3, 3), part(at, 2, 3)), 1,
                               "00002-of-00003.gguf: key 'split.no' is 2, and by the file's name it is 1"),
    "the named one has another number": (lambda at: shutil.copyfile(part(at, 3, 3), part(at, 2, 3)), 2,
                                         "is part 3 of 3, so its name must end in -00003-of-00003.gguf"),
    "one is no model": (lambda at: part(at, 2, 3).write_bytes(b"nothing"), 1, "00002-of-00003.gguf: not a GGUF file"),
    "one ends early": (lambda at: part(at, 3, 3).write_bytes(part(at, 3, 3).read_bytes()[:-1]), 1,
                       "00003-of-00003.gguf: tensor '.*' ends at byte"),
    "one is of two": (lambda at: split(TINY, at, 3, changes={(2, "split.count"): 2}), 1,
                      "00002-of-00003.gguf: key 'split.count' is 2, and by the file's name it is 3"),
    "one is whole": (lambda at: shutil.copyfile(TINY, part(at, 2, 3)), 1,
                     "00002-of-00003.gguf: key 'split.no' is missing"),
    "another model's": (lambda at: split(TINY, at, 3, changes={(2, "general.name"): "other"}), 1,
                        "00002-of-00003.gguf: key 'general.name' is not what it is in .*00001-of-00003.gguf: these "
                        "are parts of different models"),
    "a tensor is missing": (lambda at: split(TINY, at, 3, changes={(i, "split.tensors.count"): 999
                                                                   for i in (1, 2, 3)}), 1,
                            "00001-of-00003.gguf: key 'split.tensors.count' is 999, and the 3 parts have"),
    "a tensor twice": (lambda at: (split(TINY, at, 3, [5, 5, 5]), twice(at)), 1,
                       "00003-of-00003.gguf: tensor '.*' is also in .*00002-of-00003.gguf"),
    "the named one does not count": (lambda at: split(TINY, at, 3, changes={(1, "split.count"): None}), 1,
                                     "00001-of-00003.gguf: tensor '.*' is missing"),
    "no number": (lambda at: split(TINY, at, 3, changes={(1, "split.no"): None}), 1, "key 'split.no' is missing"),
    "no count of tensors": (lambda at: split(TINY, at, 3, changes={(1, "split.tensors.count"): None}), 1,
                            "key 'split.tensors.count' is missing"),
}


def test_lists_of_strings_are_compared_as_lists():
    """NumPy would give each of a million short strings the bytes of the longest one."""
    strings = ["a"] * 1_000_000 + ["b" * 1_000_000]
    assert same_value(strings, list(strings)) and not same_value(strings, [*strings, "c"])
    assert same_value(np.arange(3), np.arange(3)) and not same_value(np.arange(3), [0, 1, 2])
    assert same_value(1, 1) and not same_value(1, "1")


def twice(folder):
    """Gives part 3 the tensors of part 2."""
    second = folder / "2"
    second.mkdir()
    split(TINY, second, 3, [5, 5, 5], {(2, "split.no"): 2})
    shutil.copyfile(part(second, 2, 3), part(folder, 3, 3))


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_are_wrong(tmp_path, case):
    break_it, named, words = WRONG[case]
    split(TINY, tmp_path, 3)
    break_it(tmp_path)
    path = tmp_path / named if isinstance(named, str) else part(tmp_path, named, 3)
    with pytest.raises(qengine.ModelError, match=words) as error:
        qengine.open_model(path)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


def test_a_damaged_tensor_is_named_with_its_file(tmp_path, card):
    paths = split(TINY, tmp_path, 3)
    model = GGUF(paths[0])
    name = next(name for name, tensor in model.tensors.items()
                if model.file_of[name].path == str(paths[2]) and tensor.type == "Q8_0")
    raw, at = bytearray(paths[2].read_bytes()), model.tensors[name].offset
    raw[at:at + 2] = np.float16(np.nan).tobytes()
    paths[2].write_bytes(raw)
    with pytest.raises(qengine.ModelError, match=f"00003-of-00003.gguf: tensor '{name}' holds"):
        GGUF(paths[0]).floats(name)
    with pytest.raises(qengine.ModelError, match=f"00003-of-00003.gguf: tensor '{name}' holds"):
        qengine.load(str(paths[0]), card=card, progress=False, ctx=CONTEXT)


def test_mutated_headers_of_parts(tmp_path):
    """200 damaged sets: each loads or ends in one sentence that names one of its files."""
    paths, rng, refused = split(TINY, tmp_path, 3), random.Random(6), 0
    sound = {path: path.read_bytes() for path in paths}
    for case in range(200):
        path = rng.choice(paths[1:])                # whose headers are short, and of keys for the most part
        end = min(tensor.offset for tensor in File(path).tensors.values())
        content = bytearray(sound[path])
        damage(content, [range(24, 220), range(24, end)], rng)
        path.write_bytes(content[:len(sound[path])])
        try:
            GGUF(rng.choice(paths))
        except qengine.ModelError as error:
            assert str(error).startswith(str(tmp_path / "model-0")) and "\n" not in str(error), (case, str(error))
            refused += 1
        path.write_bytes(sound[path])
    assert 100 < refused < 200
