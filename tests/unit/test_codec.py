"""msgpack with tensors: there and back, and only PayloadInvalid for what is broken."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mainspring_broker.codec import DTYPES, pack, unpack
from mainspring_broker.errors import PayloadInvalid

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary()
values = st.recursive(
    plain | arrays, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same type, and NaN equals NaN."""
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or a != a)


@given(values)
def test_unpack_is_the_inverse_of_pack(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_a_tensor_travels_raw_and_little_endian() -> None:
    raw = msgpack.unpackb(pack(np.array([[1, 2]], dtype=">i4")))
    assert raw == {"dtype": "<i4", "shape": [1, 2], "data": b"\x01\0\0\0\x02\0\0\0"}


def test_a_tensor_need_not_be_contiguous() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    assert np.array_equal(unpack(pack(array)), array)


def test_a_tensor_comes_back_read_only_without_a_copy_of_its_bytes() -> None:
    array = unpack(pack(np.zeros(4, np.float32)))
    assert not array.flags.writeable
    assert not array.flags.owndata


def test_a_numpy_scalar_becomes_a_plain_one() -> None:
    assert unpack(pack([np.float32(0.5), np.int64(3), np.bool_(True)])) == [0.5, 3, True]


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array(["a"]), np.array([1j]), np.zeros(2, np.float16)])
def test_what_has_no_wire_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"send|sent"):
        pack(value)


def tensor(**changed: Any) -> bytes:
    packed: bytes = msgpack.packb({"dtype": "<f4", "shape": [2], "data": b"\0" * 8, **changed})
    return packed


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "<f2"}, {"dtype": "O"}, {"dtype": 4}, {"dtype": ["<f4"]}, {"dtype": None},
        {"shape": [3]}, {"shape": [-2]}, {"shape": [2.0]}, {"shape": [True, 2]}, {"shape": 2}, {"shape": "2"},
        {"shape": [1] * 8 + [2]}, {"shape": [2**62, 2**62]}, {"shape": [0, -1]}, {"shape": [0, 2**80 % 2**63]},
        {"data": b"\0" * 7}, {"data": b"\0" * 9}, {"data": "\0" * 8}, {"data": [0] * 8}, {"data": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_contradicts_itself_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(PayloadInvalid):
        unpack(tensor(**changed))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\xff\xff", pack([1]) + b"\0", msgpack.packb({1: 2}), b"\xa2\xff\xfe", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"],
    ids=["empty", "reserved", "trailing", "bytes behind", "integer key", "not utf-8", "too deep", "huge array"],
)  # fmt: skip
def test_what_is_not_msgpack_is_refused(data: bytes) -> None:
    with pytest.raises(PayloadInvalid, match="bytes"):
        unpack(data)


@pytest.mark.parametrize(
    "value",
    [[None] * 70_000, [[]] * 40_000, [{}] * 40_000, {str(i): 0 for i in range(70_000)}, [[[0] * 300] * 300]],
    ids=["list", "empty lists", "empty maps", "map", "lists of lists"],
)
def test_a_few_bytes_cannot_become_a_lot_of_memory(value: Any) -> None:
    with pytest.raises(PayloadInvalid):
        unpack(msgpack.packb(value))


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_else(data: bytes) -> None:
    with contextlib.suppress(PayloadInvalid):
        unpack(data)


@given(values, st.data())
def test_truncated_and_bit_flipped_payloads_raise_nothing_else(value: Any, data: st.DataObject) -> None:
    packed = bytearray(pack(value))
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(PayloadInvalid):
        unpack(bytes(packed[:cut]))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(PayloadInvalid):
        unpack(bytes(packed))
