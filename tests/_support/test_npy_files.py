import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from recsys._support.npy_files import NpzFile, open_array, read_array

ARRAY = np.arange(12, dtype=np.int32).reshape(3, 4)


def npy(array=ARRAY):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def with_header(text, version=b"\1\0", length=None):
    size = "<H" if version == b"\1\0" else "<I"
    header = text.encode()
    return b"\x93NUMPY" + version + struct.pack(size, length or len(header)) + header


def with_shape(shape, descr="<f4"):
    return with_header(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}")


def opened(data):
    return open_array(io.BytesIO(data), len(data))


@pytest.mark.parametrize(
    "array", [ARRAY, ARRAY[:0], np.asfortranarray(ARRAY), np.array(5.0), ARRAY.astype(">f8")]
)
def test_a_header_is_read_as_numpy_writes_it(array):
    found = opened(npy(array))

    assert (found.shape, found.dtype, found.is_fortran) == (
        array.shape,
        array.dtype,
        array.flags.f_contiguous and not array.flags.c_contiguous,
    )


@pytest.mark.parametrize("array", [ARRAY, ARRAY[:0], np.asfortranarray(ARRAY), np.array(5.0)])
def test_data_is_read_whole(array):
    np.testing.assert_array_equal(read_array(opened(npy(array))), array)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it does not begin with"),
        (npy()[:-1], r"ends too early: its header says \(3, 4\) of int32, which takes 48 bytes"),
        (npy() + b"\0", "ends too late"),
        (
            with_shape("(2**60,)"),
            "its header",
        ),
        (
            with_header(
                "{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976,)}"
            ),
            r"which takes 4611686018427387904 bytes, and 0 follow",
        ),
        (
            with_shape("(-1,)"),
            "its header must",
        ),
        (with_header("{'descr': '<f4', 'shape': (1,)}"), "its header must be of descr"),
        (with_header("{'a': " * 500), "its header must be of descr"),  # takes Python all memory
        (with_header("", b"\2\0", 2**32 - 1), "its header has 4294967295 bytes, more than 10000"),
        (with_header("{}", b"\3\0"), "must be 1.0 or 2.0, got 3.0"),
        (npy(np.array(["a"])), "must hold numbers, got dtype <U1"),
        (
            with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + b"c",
            "got dtype ob",
        ),
    ],
)
def test_a_damaged_array_is_refused_before_anything_is_allocated(data, message):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            opened(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**20


def archive(file, member=None, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(file, "w", method) as made:
        made.writestr("a.npy", npy() if member is None else member)
    return file


def test_an_array_of_an_archive_is_read(tmp_path):
    with NpzFile(archive(tmp_path / "f.npz")) as found:
        np.testing.assert_array_equal(read_array(found.open_array("a")), ARRAY)


def test_a_member_that_states_more_bytes_than_it_can_hold_is_refused(tmp_path):
    file = archive(tmp_path / "f.npz")
    data = bytearray(file.read_bytes())
    place = data.index(b"PK\1\2") + 24  # the size after expansion
    data[place : place + 4] = struct.pack("<I", 2**31)
    file.write_bytes(data)

    with NpzFile(file) as found, pytest.raises(ValueError, match="2147483648 bytes cannot be in"):
        found.open_array("a")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_methods_are_refused(tmp_path, method):
    file = archive(tmp_path / "f.npz", method=method)

    with NpzFile(file) as found, pytest.raises(ValueError, match="must be stored or deflated"):
        found.open_array("a")


def test_an_array_in_an_archive_must_fit_its_member(tmp_path):
    file = archive(tmp_path / "f.npz", npy()[:-4])

    with NpzFile(file) as found, pytest.raises(ValueError, match="ends too early"):
        found.open_array("a")


def test_a_folder_or_a_text_is_no_archive(tmp_path):
    (tmp_path / "text").write_text("text")

    with pytest.raises(ValueError, match="not a plain file"):
        NpzFile(tmp_path)
    with pytest.raises(ValueError, match="not a zip file"):
        NpzFile(tmp_path / "text")
