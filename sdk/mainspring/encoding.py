"""From datums to the flat wire form and back. No token becomes a Python object on the way.

The data are not judged against the model: the worker does that, the one place that knows it. Refused here is only what
has no wire form at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainspring.types import Datum, ForwardBackwardOutput, TensorData
from mainspring_broker import wire
from mainspring_broker.codec import pack
from mainspring_broker.errors import PayloadInvalid, PayloadTooLarge

TOKENS = "model_input"
WEIGHTS = "weights"
FLOAT_INPUTS = frozenset({WEIGHTS, "logprobs", "advantages"})  # float32 even when someone writes [0, 1, 1]
INT32 = np.iinfo(np.int32)
TENSOR_OVERHEAD_BYTES = 128  # field names, dtypes and shapes around the values and lengths of one input


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold; None is no limit."""

    tokens: int | None = None
    payload_bytes: int | None = None


def flatten(
    data: Sequence[Datum], loss_fn: str, loss_config: Mapping[str, Any], *, backward: bool
) -> wire.ForwardBackward:
    """The whole batch as one operation.

    An input that only some datums have gets 1.0 everywhere in the others if it is `weights`, else no values at all, so
    that the worker names the datum.

    Raises:
        PayloadInvalid: a value that is not a flat row of numbers; it says of which datum and input.
    """
    if isinstance(data, Datum) or not isinstance(data, Sequence):
        raise PayloadInvalid(f"the batch must be a list of Datum, got a {type(data).__name__}")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise PayloadInvalid(f"datum {index} is a {type(datum).__name__}, not a Datum", datum=index)
    tokens = _jagged(TOKENS, [datum.model_input.tokens for datum in data])
    inputs = {}
    for name in sorted({name for datum in data for name in datum.loss_fn_inputs}):
        rows = []
        for datum in data:
            given = datum.loss_fn_inputs.get(name)
            filler = np.ones(datum.model_input.length if name == WEIGHTS else 0, np.float32)
            rows.append(filler if given is None else given.array)
        inputs[name] = _jagged(name, rows)
    return wire.ForwardBackward(loss_fn, tokens, inputs, dict(loss_config), backward)


def _jagged(name: str, rows: list[NDArray[Any]]) -> wire.Jagged:
    for index, row in enumerate(rows):
        if row.ndim != 1:
            raise PayloadInvalid(
                f"datum {index}: {name} must have one dimension, got shape {list(row.shape)}", datum=index, input=name
            )
        if row.dtype.kind not in ("iub" if name == TOKENS else "iubf") and row.size:
            raise PayloadInvalid(
                f"datum {index}: {name} must hold {'token ids' if name == TOKENS else 'numbers'}, got {_kind(row)}",
                datum=index,
                input=name,
            )
    filled = [row for row in rows if row.size]  # an empty list has no dtype of its own
    lengths = np.array([row.size for row in rows], dtype=np.int32)
    whole = all(row.dtype.kind in "iub" for row in filled) and name not in FLOAT_INPUTS
    if not filled:
        return wire.Jagged(np.zeros(0, np.int32 if whole else np.float32), lengths)
    values = np.concatenate(filled)
    if not whole:
        return wire.Jagged(values.astype(np.float32), lengths)
    if not np.can_cast(values.dtype, np.int32):
        outside = np.flatnonzero((values < INT32.min) | (values > INT32.max))
        if outside.size:
            index = int(np.searchsorted(np.cumsum(lengths), outside[0], side="right"))
            value = int(values[outside[0]])
            raise PayloadInvalid(f"datum {index}: {name} {value} does not fit into 32 bits", datum=index, input=name)
    return wire.Jagged(values.astype(np.int32), lengths)


def _kind(row: NDArray[Any]) -> str:
    if row.dtype.kind == "O":
        return f"objects ({type(row.flat[0]).__name__}, …)"
    return "strings" if row.dtype.kind in "US" else str(row.dtype)


# -- splitting --------------------------------------------------------------------------------------------------------


def split(operation: wire.ForwardBackward, limits: Limits) -> list[wire.ForwardBackward]:
    """The operation in as few parts as the limits ask for, cut between datums, in order.

    A single datum with more tokens than the limit is a part of its own: the clock runs it alone.

    Raises:
        PayloadTooLarge: one datum alone has more bytes than a request may have.
    """
    if limits == Limits():
        return [operation]
    jagged = [operation.tokens, *operation.inputs.values()]
    sizes = (
        sum((row.lengths.astype(np.int64) + 1 for row in jagged), np.zeros(len(operation.tokens.lengths), np.int64)) * 4
    )
    overhead = len(pack([operation.loss_fn, operation.loss_config])) + TENSOR_OVERHEAD_BYTES * len(jagged)
    overhead += sum(len(name.encode()) for name in operation.inputs)
    room = None if limits.payload_bytes is None else limits.payload_bytes - overhead
    cuts, tokens, size = [0], 0, 0
    for index, (datum_tokens, datum_size) in enumerate(
        zip(operation.tokens.lengths.tolist(), sizes.tolist(), strict=True)
    ):
        if room is not None and datum_size > room:
            raise PayloadTooLarge(
                f"datum {index} has {datum_size + overhead} bytes, a request of this pool may have {limits.payload_bytes}: "
                "use shorter sequences, or have the clock allow more (max_payload_bytes)",
                datum=index,
            )
        too_many = limits.tokens is not None and tokens + datum_tokens > limits.tokens
        if index > cuts[-1] and (too_many or (room is not None and size + datum_size > room)):
            cuts.append(index)
            tokens = size = 0
        tokens += datum_tokens
        size += datum_size
    if len(cuts) == 1:
        return [operation]
    return [_slice(operation, start, end) for start, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


def _slice(operation: wire.ForwardBackward, start: int, end: int) -> wire.ForwardBackward:
    """The datums from `start` to before `end`."""

    def cut(jagged: wire.Jagged) -> wire.Jagged:
        first = int(jagged.lengths[:start].sum(dtype=np.int64))
        last = first + int(jagged.lengths[start:end].sum(dtype=np.int64))
        return wire.Jagged(jagged.values[first:last], jagged.lengths[start:end])

    return replace(
        operation, tokens=cut(operation.tokens), inputs={name: cut(rows) for name, rows in operation.inputs.items()}
    )


# -- results ----------------------------------------------------------------------------------------------------------


def join_outputs(parts: list[dict[str, Any]]) -> ForwardBackwardOutput:
    """The parts' results as one: outputs in the datums' order, sums added."""
    outputs: list[dict[str, TensorData]] = []
    loss_sum, token_count = 0.0, 0
    for part in parts:
        lengths = part["lengths"]
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        columns = {name: value for name, value in part.items() if name not in ("lengths", "metrics")}
        for start, end in zip([0, *ends], ends, strict=False):
            outputs.append({name: TensorData(values[start:end]) for name, values in columns.items()})
        loss_sum += part["metrics"]["loss_sum"]
        token_count += part["metrics"]["token_count"]
    metrics = {
        "loss_sum": loss_sum,
        "loss_mean": loss_sum / token_count if token_count else 0.0,
        "token_count": token_count,
    }
    return ForwardBackwardOutput(outputs, {**parts[0]["metrics"], **metrics} if len(parts) == 1 else metrics)
