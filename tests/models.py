"""Copies of model files with their tensors in another type."""

import gguf

import qengine


def rewrite(source, path, convert):
    """Writes the GGUF file `source` to `path` with other tensors: convert(tensor, values) takes a TensorInfo and its
    values as float32, and returns an array to store, or (bytes, GGMLQuantizationType) for a type NumPy lacks."""
    source, reader = qengine.GGUF(source), gguf.GGUFReader(str(source))
    writer = gguf.GGUFWriter(str(path), "qwen35")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for name, tensor in source.tensors.items():
        stored = convert(tensor, source.floats(name))
        array, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_as_float32(source, path):
    """The same model with every tensor dequantised."""
    rewrite(source, path, lambda tensor, values: values)
