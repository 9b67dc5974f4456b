import pytest
import safetensors.torch
import torch

from hora.errors import ConfigError
from hora.train.checkpoint.tensors import TensorFile, as_bytes, read_tensors


def _read(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    file = TensorFile("x.safetensors", tensors)
    content = b"".join(file.chunks())
    assert len(content) == file.size_bytes
    return safetensors.torch.load(content)


def test_what_is_read_does_not_depend_on_the_file_any_more(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(TensorFile("x.safetensors", {"x": torch.arange(1e5)}).chunks()))
    read = read_tensors(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(read["x"], torch.arange(1e5))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    ],
)  # fmt: skip
def test_the_library_reads_every_dtype_bit_by_bit(dtype):
    tensor = torch.arange(1, 8).to(dtype)
    read = _read({"x": tensor})["x"]
    assert read.dtype == dtype
    assert torch.equal(as_bytes(read), as_bytes(tensor))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4)])
def test_the_library_reads_every_shape(shape):
    tensor = torch.randn(shape)
    read = _read({"x": tensor})["x"]
    assert read.shape == shape
    assert torch.equal(read, tensor)


def test_many_tensors_of_mixed_types_keep_their_names_and_values():
    tensors = {"b.é\n": torch.ones(3, dtype=torch.uint8), "": torch.randn(2), "a": torch.tensor(7), "c": torch.tensor([True, False])}
    read = _read(tensors)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_views_conjugates_and_parameters_are_written_as_they_look():
    base = torch.arange(12.0).reshape(3, 4)
    odd = {
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(base),
    }
    read = _read(odd)
    assert all(torch.equal(read[name], tensor) for name, tensor in odd.items())


def test_nan_payloads_and_negative_zero_survive():
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int32)
    assert torch.equal(_read({"x": bits.view(torch.float32)})["x"].view(torch.int32), bits)


def test_no_tensors_make_a_valid_file():
    assert _read({}) == {}


def test_every_tensor_is_aligned_to_its_items():
    file = TensorFile(
        "x.safetensors",
        {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(1, dtype=torch.int16)},
    )
    header, *data = file.chunks()
    assert len(header) % 8 == 0
    assert [len(chunk) for chunk in data] == [8, 2, 3]


def test_a_dtype_without_a_name_is_refused_by_the_tensors_name():
    with pytest.raises(ConfigError, match=r"x\.safetensors cannot hold tensors of these names and types: \{'y': 'torch.complex128'\}"):
        TensorFile("x.safetensors", {"x": torch.ones(1), "y": torch.ones(1, dtype=torch.complex128)})


def test_the_name_that_the_format_keeps_for_itself_is_refused():
    with pytest.raises(ConfigError, match="__metadata__"):
        TensorFile("x.safetensors", {"__metadata__": torch.ones(1)})
