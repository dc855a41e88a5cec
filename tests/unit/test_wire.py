"""Operations and envelopes: there and back, and typed errors for everything else."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring_broker import wire
from mainspring_broker.codec import pack, unpack
from mainspring_broker.errors import PayloadInvalid, UnknownOperation
from mainspring_broker.wire import (
    OPS,
    End,
    Envelope,
    ForwardBackward,
    Init,
    Jagged,
    LoadState,
    Operation,
    OptimStep,
    SaveState,
    SaveWeights,
    decode_envelope,
    decode_operation,
    encode_envelope,
    encode_operation,
    op_name,
    token_count,
)


def jagged(rows: list[list[int]], dtype: str = "<i4") -> Jagged:
    flat = [value for row in rows for value in row]
    return Jagged(np.array(flat, dtype), np.array([len(row) for row in rows], "<i4"))


finite = st.floats(allow_nan=False, width=32)
tokens = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=4)
forward_backwards = st.builds(
    ForwardBackward,
    loss_fn=st.text(max_size=20),
    tokens=tokens.map(jagged),
    inputs=st.dictionaries(
        st.sampled_from(["target_tokens", "weights"]),
        tokens.map(jagged) | st.lists(st.lists(finite, max_size=3), max_size=3).map(lambda r: jagged(r, "<f4")),  # type: ignore[arg-type]
    ),
    loss_config=st.dictionaries(st.text(max_size=5), finite | st.booleans() | st.text(max_size=5), max_size=3),
    backward=st.booleans(),
)
operations: st.SearchStrategy[Operation] = st.one_of(
    forward_backwards,
    st.builds(
        Init,
        rank=st.integers(1, 512),
        seed=st.integers(0, 2**63 - 1),
        train_attn=st.booleans(),
        train_mlp=st.booleans(),
        train_unembed=st.booleans(),
        alpha=finite,
    ),
    st.builds(OptimStep, learning_rate=finite, beta1=finite, beta2=finite, eps=finite, weight_decay=finite),
    st.builds(LoadState, path=st.text(max_size=30), optimizer=st.booleans()),
    st.builds(SaveState, name=st.text(max_size=30), ttl_seconds=st.none() | st.integers(-5, 2**40)),
    st.builds(SaveWeights, name=st.text(max_size=30), ttl_seconds=st.none() | st.integers(-5, 2**40)),
    st.just(End()),
)


def comparable(value: Any) -> Any:
    if isinstance(value, ForwardBackward):
        parts = {"tokens": value.tokens, **value.inputs}
        flat = {k: (j.values.dtype, j.values.tolist(), j.lengths.tolist()) for k, j in parts.items()}
        return (value.loss_fn, value.loss_config, value.backward, flat)
    return value


@given(operations)
def test_an_operation_comes_back_as_it_was(operation: Operation) -> None:
    decoded = decode_operation(op_name(operation), encode_operation(operation))
    assert type(decoded) is type(operation)
    assert comparable(decoded) == comparable(operation)


def test_every_operation_has_its_name() -> None:
    batch = ForwardBackward("cross_entropy", jagged([[1]]), {})
    saves = [SaveState("x"), SaveWeights("x")]
    computes = [replace(batch, backward=False), batch, OptimStep()]
    named = [Init(rank=8, seed=1), LoadState("x"), *computes, *saves, End()]
    assert [op_name(operation) for operation in named] == list(OPS)


def test_tokens_are_counted_where_they_go_through_the_model() -> None:
    batch = ForwardBackward("cross_entropy", jagged([[1, 2, 3], [], [4]]), {})
    assert token_count(batch) == batch.token_count == 4
    assert token_count(OptimStep()) == 0


def test_fields_that_are_left_out_get_their_defaults() -> None:
    assert decode_operation("optim_step", pack({})) == OptimStep()
    assert decode_operation("init", pack({"rank": 4, "seed": 7})) == Init(rank=4, seed=7)
    assert decode_operation("optim_step", pack({"learning_rate": 1})) == OptimStep(learning_rate=1.0)
    assert decode_operation("save_state", pack({"name": "x"})) == SaveState("x", ttl_seconds=None)


def test_an_unknown_operation_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UnknownOperation, match=r"'fly'.*forward_backward") as caught:
        decode_operation("fly", pack({}))
    assert caught.value.details == {"op": "fly"}


@pytest.mark.parametrize(
    ("op", "body", "message"),
    [
        ("init", {"seed": 1}, "missing rank"),
        ("init", {"rank": 8, "seed": 1, "colour": "red", "size": 3}, "unknown field colour, size"),
        ("init", {"rank": "8", "seed": 1}, "rank must be int, got str"),
        ("init", {"rank": True, "seed": 1}, "rank must be int, got bool"),
        ("init", {"rank": 8, "seed": 1, "train_mlp": 1}, "train_mlp must be bool, got int"),
        ("optim_step", {"learning_rate": None}, "learning_rate must be float, got NoneType"),
        ("optim_step", {"beta1": True}, "beta1 must be float, got bool"),
        ("optim_step", [1, 2], "must be a map, got list"),
        ("save_weights", {}, "missing name"),
        ("save_weights", {"name": b"x"}, "name must be str, got bytes"),
        ("save_state", {"name": "x", "ttl_seconds": 1.5}, "ttl_seconds must be int, got float"),
        ("load_state", {"path": None}, "path must be str, got NoneType"),
        ("end", {"now": True}, "unknown field now"),
        ("forward", 3, "must be a map, got int"),
        ("forward_backward", {"loss_fn": "x"}, "missing inputs, tokens"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_with_the_field(op: str, body: Any, message: str) -> None:
    with pytest.raises(PayloadInvalid, match=message):
        decode_operation(op, pack(body))


I4 = np.dtype("<i4")


def rows(values: Any, lengths: Any) -> dict[str, Any]:
    return {"values": values, "lengths": lengths}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_fn": 3}, "loss_fn must be a string"),
        ({"loss_config": [1]}, "must be maps"),
        ({"inputs": [1]}, "must be maps"),
        ({"inputs": {"weights": [0.5]}}, "weights must be a map of values and lengths"),
        ({"tokens": [1, 2]}, "tokens must be a map of values and lengths"),
        ({"tokens": rows(np.zeros(1, I4), np.ones(1, I4)) | {"more": 1}}, "tokens must be a map"),
        ({"tokens": rows(np.zeros(1, "<f4"), np.ones(1, I4))}, "tokens must be int32, got float32"),
        ({"tokens": rows([1], np.ones(1, I4))}, "values of tokens must be a tensor"),
        ({"tokens": rows(np.zeros((1, 1), I4), np.ones(1, I4))}, "one dimension"),
        ({"tokens": rows(np.zeros(1, I4), np.ones(1, "<f4"))}, "lengths of tokens must be an int32 tensor"),
        ({"tokens": rows(np.zeros(1, I4), 1)}, "lengths of tokens must be an int32 tensor"),
        ({"tokens": rows(np.zeros(2, I4), np.array([3], I4))}, "do not add up to its 2 values"),
        ({"tokens": rows(np.zeros(2, I4), np.array([-1, 3], I4))}, "do not add up"),
        ({"tokens": rows(np.zeros(2, I4), np.zeros(0, I4))}, "has 2 values but no lengths"),
        ({"tokens": rows(np.zeros(2, I4), np.array([2**63 - 1, 2**63 - 1, 4], "<i8"))}, "do not add up"),
    ],
)  # fmt: skip
def test_a_wrong_batch_is_refused_with_the_input(changed: dict[str, Any], message: str) -> None:
    body = {"loss_fn": "cross_entropy", "tokens": rows(np.zeros(1, I4), np.ones(1, I4)), "inputs": {}}
    assert decode_operation("forward_backward", pack(body))
    with pytest.raises(PayloadInvalid, match=message):
        decode_operation("forward_backward", pack(body | changed))


def test_lengths_of_64_bits_are_narrowed() -> None:
    body = {"loss_fn": "x", "tokens": rows(np.zeros(3, I4), np.array([1, 2], "<i8")), "inputs": {}}
    decoded = decode_operation("forward", pack(body))
    assert isinstance(decoded, ForwardBackward)
    assert not decoded.backward
    assert (decoded.tokens.lengths.dtype, decoded.tokens.lengths.tolist()) == (np.int32, [1, 2])


@given(st.sampled_from([*OPS, "fly"]), st.binary(max_size=100))
def test_garbage_raises_typed_errors_only(op: str, data: bytes) -> None:
    with pytest.raises((PayloadInvalid, UnknownOperation)):
        decode_operation(op, b"\xc1" + data)
    with contextlib.suppress(PayloadInvalid, UnknownOperation):
        decode_operation(op, data)


@given(operations, st.data())
def test_truncated_and_bit_flipped_payloads_raise_typed_errors_only(operation: Operation, data: st.DataObject) -> None:
    op, payload = op_name(operation), bytearray(encode_operation(operation))
    with pytest.raises(PayloadInvalid):
        decode_operation(op, bytes(payload[: data.draw(st.integers(0, len(payload) - 1))]))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(PayloadInvalid):
        assert op_name(decode_operation(op, bytes(payload))) == op


# -- envelopes --------------------------------------------------------------------------------------------------------

ENVELOPE = Envelope({"loss": 1.5}, None, cycle=3, queued_ms=2.5, compute_ms=7.25, worker="w1")


def test_an_envelope_comes_back_as_it_was() -> None:
    assert decode_envelope(encode_envelope(ENVELOPE)) == ENVELOPE
    failed = replace(ENVELOPE, result=None, error={"code": "out_of_memory", "message": "no", "details": {"datum": 3}})
    assert decode_envelope(encode_envelope(failed)) == failed


def test_a_newer_envelope_with_more_fields_is_understood() -> None:
    newer = unpack(encode_envelope(ENVELOPE)) | {"colour": "red"}
    assert decode_envelope(pack(newer)) == ENVELOPE


@pytest.mark.parametrize("data", [b"", pack(None), pack([1]), pack({}), pack({"result": {}})])
def test_what_is_not_an_envelope_is_refused(data: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        decode_envelope(data)


def test_alpha_over_rank_is_the_scaling_at_every_rank() -> None:
    assert Init(rank=4, seed=0).alpha == Init(rank=64, seed=0).alpha == wire.LORA_ALPHA
