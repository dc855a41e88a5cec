"""msgpack with tensors: a numpy array travels as `{"dtype", "shape", "data"}`, raw and little-endian.

`pack` and `unpack` are inverse to each other for None, bool, int, float, str, bytes, lists, maps with string keys,
and the arrays of `DTYPES`. Arrays come back read-only, without a copy of their bytes.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from mainspring_broker.errors import PayloadInvalid

DTYPES = frozenset({"<f4", "<f8", "<i4", "<i8", "|u1", "|b1"})
MAX_DIMENSIONS = 8
MAX_VALUES = 1 << 16  # entries of all lists and maps of a message: one byte each on the wire, a hundred in memory
_TENSOR_KEYS = {"dtype", "shape", "data"}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        if array.dtype.str not in DTYPES:
            raise TypeError(f"tensor dtype {value.dtype} cannot be sent; use float32, float64, int32, int64 or bool")
        return {"dtype": array.dtype.str, "shape": list(value.shape), "data": array.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot send a {type(value).__name__}")


def _decode(value: dict[Any, Any]) -> Any:
    if value.keys() != _TENSOR_KEYS:
        return value
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if dtype not in DTYPES:
        raise PayloadInvalid(f"tensor dtype {dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise PayloadInvalid("a tensor's shape must be a list of at most 8 sizes")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise PayloadInvalid("a tensor's sizes must be integers, 0 or more")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        got = len(data) if isinstance(data, bytes) else type(data).__name__
        raise PayloadInvalid(f"a tensor of shape {shape} and dtype {dtype} has {expected} bytes, got {got}")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def pack(value: Any) -> bytes:
    """`value` as msgpack bytes.

    Raises:
        TypeError: a value of a type that has no wire form.
    """
    packed: bytes = msgpack.packb(value, default=_encode, use_bin_type=True)
    return packed


def unpack(data: bytes) -> Any:
    """The value that `pack` was given.

    Raises:
        PayloadInvalid: not msgpack, truncated, bytes behind the end, or a tensor that contradicts itself.
    """
    left = MAX_VALUES

    def count(entries: int) -> None:
        nonlocal left
        left -= 1 + entries
        if left < 0:
            raise PayloadInvalid(f"the payload holds more than {MAX_VALUES} values; numbers belong into tensors")

    def decode_map(value: dict[Any, Any]) -> Any:
        count(len(value))
        return _decode(value)

    def decode_list(value: list[Any]) -> list[Any]:
        count(len(value))
        return value

    try:
        return msgpack.unpackb(
            data,
            object_hook=decode_map,
            list_hook=decode_list,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_VALUES,
            max_map_len=MAX_VALUES,
        )
    except PayloadInvalid:
        raise
    except Exception as error:  # msgpack raises a dozen unrelated types for bad input
        raise PayloadInvalid(
            f"the payload ({len(data)} bytes) is not valid msgpack: {error or type(error).__name__}"
        ) from None
