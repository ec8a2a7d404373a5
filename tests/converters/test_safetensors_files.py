"""Headers that lie are refused by name; maps give the bytes wherever they lie; written files are aligned and valid."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from dewconv.converters.dtypes import NUMPY, PACKED_BITS, numpy_dtype, safetensors_dtype
from dewconv.converters.safetensors_files import (
    FileWriter,
    MappedFile,
    TensorSpec,
    lay_out,
    lay_out_in_order,
    read_header,
)
from dewconv.families.errors import ConversionError


def write_raw(path: Path, header: bytes, data: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


FAULTS = {
    "length beyond the file": (b"{}", b"", 2**63, "the header says it is"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "not UTF-8"),
    "not JSON": (b"{'a'", b"", None, "not JSON"),
    "not an object": (b"[1]", b"", None, "not a JSON object"),
    "deep JSON": (b"[" * 200_000, b"", None, "not JSON"),
    "a key twice": (
        b'{"w": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "w": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        "'w' twice",
    ),
    "unknown dtype": ({"w": entry("F12")}, bytes(8), None, "'w' has the unknown dtype 'F12'"),
    "dtype not text": ({"w": entry(7)}, bytes(8), None, "'w' has the unknown dtype 7"),
    "negative size": ({"w": entry(shape=(-2,))}, bytes(8), None, "'w' has the shape"),
    "size not a number": ({"w": entry(shape=(True,))}, bytes(8), None, "'w' has the shape"),
    "offsets reversed": ({"w": entry(offsets=(8, 0))}, bytes(8), None, "'w'"),
    "offsets not two": ({"w": entry(offsets=(0, 4, 8))}, bytes(8), None, "'w' has the data_offsets"),
    "shape against offsets": ({"w": entry(shape=(3,))}, bytes(8), None, "takes 12 bytes, its offsets span 8"),
    "huge shape": ({"w": entry(shape=(2**62, 2**62))}, bytes(8), None, "'w'"),
    "a field missing": ({"w": {"dtype": "F32", "shape": [2]}}, bytes(8), None, "'w' must have exactly"),
    "a gap": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), None, "'b' starts at byte 12"),
    "an overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), None, "overlaps"),
    "truncated data": ({"a": entry()}, bytes(7), None, "truncated"),
    "bytes left over": ({"a": entry()}, bytes(9), None, "bytes no tensor owns"),
    "half a byte": ({"a": entry("F4", (3,), (0, 1))}, bytes(1), None, "do not fill whole bytes"),
    "half a surrogate pair": (
        b'{"w\\udc00": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        "half a surrogate pair",
    ),
    "metadata not text": ({"__metadata__": {"a": 1}, "a": entry()}, bytes(8), None, "__metadata__"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_at_fault_is_refused_naming_file_and_key(tmp_path, fault):
    header, data, length, message = FAULTS[fault]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = write_raw(tmp_path / "lying.safetensors", text, data, length)
    with pytest.raises(ConversionError) as caught:
        read_header(path)
    assert "lying.safetensors" in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header_is_refused(tmp_path, size):
    (tmp_path / "short.safetensors").write_bytes(bytes(size))
    with pytest.raises(ConversionError, match="too short"):
        read_header(tmp_path / "short.safetensors")


@pytest.mark.parametrize("name", sorted(NUMPY))
def test_every_dtype_reads_back_the_bytes_the_library_wrote(tmp_path, tiny, name):
    dtype = numpy_dtype(name)
    assert safetensors_dtype(dtype) == name
    shape = (3, 5)
    data = tiny.random_bits(shape, dtype, 3) if dtype != np.bool_ else np.arange(15).reshape(shape) % 2 == 0
    header = json.dumps({"w": entry(name, shape, (0, data.nbytes))}).encode()
    path = write_raw(tmp_path / "a.safetensors", header, data.tobytes())
    with safe_open(path, "numpy") as library:
        assert list(library.keys()) == ["w"]
    mapped = MappedFile(path)
    assert mapped.view("w").dtype == dtype
    assert mapped.view("w").shape == shape
    assert mapped.view("w").tobytes() == mapped.raw("w").tobytes() == data.tobytes()


@pytest.mark.parametrize("name", sorted(PACKED_BITS))
def test_packed_dtypes_can_be_carried_and_not_viewed(tmp_path, name):
    size = 8 * PACKED_BITS[name] // 8
    header = json.dumps({"w": entry(name, (8,), (0, size))}).encode()
    mapped = MappedFile(write_raw(tmp_path / "a.safetensors", header, bytes(range(size))))
    assert mapped.raw("w").tobytes() == bytes(range(size))
    with pytest.raises(ConversionError, match=name):
        mapped.view("w")


@pytest.mark.parametrize("padding", range(8))
def test_views_are_right_and_readonly_wherever_the_data_start(tmp_path, tiny, padding):
    odd = np.arange(3, dtype=np.uint8)
    values = tiny.random_bits((7, 5), np.dtype(ml_dtypes.bfloat16), 1)
    header = json.dumps({"odd": entry("U8", (3,), (0, 3)), "w": entry("BF16", (7, 5), (3, 73))}).encode()
    path = write_raw(tmp_path / "a.safetensors", header + b" " * padding, odd.tobytes() + values.tobytes())
    view = MappedFile(path).view("w")
    assert view.tobytes() == values.tobytes()
    assert np.array_equal(np.ascontiguousarray(view.T).view(np.uint16), values.T.view(np.uint16))
    assert not view.flags.writeable


def test_scalars_and_empty_tensors_read(tmp_path):
    save_file({"scalar": np.array(7.5, np.float32), "empty": np.zeros((0, 8), np.float16)}, tmp_path / "a.safetensors")
    mapped = MappedFile(tmp_path / "a.safetensors")
    assert mapped.view("scalar").shape == ()
    assert mapped.view("scalar") == 7.5
    assert mapped.view("empty").shape == (0, 8)


def test_a_file_that_changed_after_its_header_was_read_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(4, np.float32)}, path)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConversionError, match="changed"):
        MappedFile(path, header)


SPECS = [
    TensorSpec("scalar", "F32", ()),
    TensorSpec("odd", "BF16", (3, 7)),
    TensorSpec("matrix", "BF16", (16, 96)),
    TensorSpec("empty", "F16", (0, 8)),
    TensorSpec("bytes", "U8", (5,)),
    TensorSpec("name é", "F32", (64,)),
]


def written(path, header):
    contents = {}
    writer = FileWriter(path, header)
    for seed, item in enumerate(header.entries.values()):
        data = np.random.default_rng(seed).integers(0, 256, item.nbytes, np.uint8)
        for start in reversed(range(0, item.nbytes, 7)):
            writer.write_at(item.name, start, data[start : start + 7])
        contents[item.name] = data.tobytes()
    writer.close()
    return contents


def test_a_file_laid_out_is_aligned_and_opens_in_the_library(tmp_path):
    header = lay_out(SPECS, {"format": "pt"})
    contents = written(tmp_path / "a.safetensors", header)
    assert header.data_start % 4096 == 0
    for spec in SPECS:
        begin = header.entries[spec.name].begin
        if spec.nbytes % 64 == 0:
            assert begin % 64 == 0, spec.name
        if spec.nbytes:
            assert begin % numpy_dtype(spec.dtype).itemsize == 0, spec.name
    assert read_header(tmp_path / "a.safetensors").entries == header.entries
    with safe_open(tmp_path / "a.safetensors", "numpy") as library:
        assert library.metadata() == {"format": "pt"}
        assert set(library.keys()) == {spec.name for spec in SPECS}
    mapped = MappedFile(tmp_path / "a.safetensors")
    assert {name: mapped.raw(name).tobytes() for name in contents} == contents


def test_the_usual_layout_keeps_the_order_given(tmp_path):
    header = lay_out_in_order(SPECS)
    written(tmp_path / "a.safetensors", header)
    assert [item.name for item in read_header(tmp_path / "a.safetensors").entries.values()] == [s.name for s in SPECS]
    assert header.data_start % 8 == 0
    with safe_open(tmp_path / "a.safetensors", "numpy") as library:
        assert len(list(library.keys())) == len(SPECS)


def test_a_writer_refuses_what_passes_a_tensor_and_an_existing_file(tmp_path):
    header = lay_out([TensorSpec("a", "U8", (4,)), TensorSpec("b", "U8", (4,))])
    writer = FileWriter(tmp_path / "a.safetensors", header)
    with pytest.raises(ConversionError, match="'a'"):
        writer.write_at("a", 2, np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        writer.write_at("a", 0, np.zeros(8, np.uint8)[::2])
    writer.close()
    with pytest.raises(FileExistsError):
        FileWriter(tmp_path / "a.safetensors", header)


def test_one_name_twice_cannot_be_laid_out():
    with pytest.raises(ConversionError, match="'a'"):
        lay_out([TensorSpec("a", "U8", (4,)), TensorSpec("a", "U8", (4,))])
