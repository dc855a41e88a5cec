"""From datums to the wire and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mainspring as trio
from mainspring import encoding
from mainspring.encoding import Limits
from mainspring_broker import wire
from mainspring_broker.errors import PayloadInvalid, PayloadTooLarge


def datum(tokens, **inputs):
    return trio.Datum(trio.ModelInput.from_ints(tokens), inputs)


def flatten(*data):
    return encoding.flatten(data, "cross_entropy", {}, backward=True)


def rows(jagged):
    return [row.tolist() for row in np.split(jagged.values, np.cumsum(jagged.lengths)[:-1])]


def test_a_batch_becomes_flat_arrays():
    operation = flatten(datum([1, 2, 3], target_tokens=[2, 3, 4]), datum([5], target_tokens=[6]))
    assert operation.tokens.values.dtype == np.int32
    assert rows(operation.tokens) == [[1, 2, 3], [5]]
    assert rows(operation.inputs["target_tokens"]) == [[2, 3, 4], [6]]
    assert operation.token_count == 4
    assert wire.op_name(operation) == "forward_backward"


def test_integers_become_int32_and_floats_float32():
    operation = flatten(datum([1], target_tokens=np.array([2], np.uint8), advantages=[0.5], extra=[1], other=[1.5]))
    dtypes = {name: jagged.values.dtype.name for name, jagged in operation.inputs.items()}
    assert dtypes == {"target_tokens": "int32", "advantages": "float32", "extra": "int32", "other": "float32"}


def test_weights_written_as_integers_or_booleans_are_floats():
    operation = flatten(datum([1, 2], weights=[0, 1]), datum([1, 2], weights=[True, False]))
    assert operation.inputs["weights"].values.dtype == np.float32
    assert rows(operation.inputs["weights"]) == [[0.0, 1.0], [1.0, 0.0]]


def test_weights_missing_from_some_datums_are_ones():
    operation = flatten(datum([1, 2]), datum([3], weights=[0.5]))
    assert rows(operation.inputs["weights"]) == [[1.0, 1.0], [0.5]]


def test_another_missing_input_is_left_to_the_worker_to_name():
    operation = flatten(datum([1, 2], target_tokens=[2, 3]), datum([3]))
    assert rows(operation.inputs["target_tokens"]) == [[2, 3], []]
    assert operation.inputs["target_tokens"].values.dtype == np.int32


def test_what_only_the_model_can_judge_goes_through():
    operation = flatten(datum([], target_tokens=[]), datum([-5, 2**31 - 1], target_tokens=[1], weights=[float("nan")]))
    assert operation.tokens.lengths.tolist() == [0, 2]
    assert wire.decode_operation("forward_backward", wire.encode_operation(operation)).token_count == 2


def test_an_empty_batch_goes_through():
    operation = flatten()
    decoded = wire.decode_operation("forward_backward", wire.encode_operation(operation))
    assert isinstance(decoded, wire.ForwardBackward)
    assert len(decoded.tokens.lengths) == 0


@pytest.mark.parametrize(
    ("bad", "name", "says"),
    [
        (datum(["a", "b"]), "model_input", "strings"),
        (datum([[1, 2], [3, 4]]), "model_input", r"shape \[2, 2\]"),
        (datum([[1, 2], [3]]), "model_input", "objects"),
        (datum([1.5]), "model_input", "float64"),
        (datum([2**31]), "model_input", "2147483648 does not fit"),
        (datum([2**70]), "model_input", "objects"),
        (datum([1], target_tokens=[-(2**31) - 1]), "target_tokens", "-2147483649 does not fit"),
        (datum([1], weights=[None]), "weights", "objects"),
        (datum([1], weights=1.0), "weights", "one dimension"),
        (datum([1], other=[1 + 2j]), "other", "complex"),
    ],
)
def test_what_has_no_wire_form_is_refused_by_datum_and_name(bad, name, says):
    with pytest.raises(PayloadInvalid, match=says) as caught:
        flatten(datum([1, 2]), bad)
    assert caught.value.details == {"datum": 1, "input": name}
    assert f"datum 1: {name}" in caught.value.message


def test_a_value_out_of_range_is_traced_to_its_datum_across_empty_ones():
    with pytest.raises(PayloadInvalid, match="datum 3"):
        flatten(datum([1, 2]), datum([]), datum([]), datum([1, 2**40]))


def test_something_else_in_the_batch_is_refused():
    with pytest.raises(PayloadInvalid, match="datum 1 is a dict"):
        flatten(datum([1]), {"model_input": [1]})


# -- splitting --------------------------------------------------------------------------------------------------------


def batch(*lengths):
    return flatten(*(datum([index] * length, target_tokens=[index] * length) for index, length in enumerate(lengths)))


def lengths_of(parts):
    return [part.tokens.lengths.tolist() for part in parts]


def test_no_limit_no_split():
    operation = batch(5, 5, 5)
    assert encoding.split(operation, Limits()) == [operation]
    assert encoding.split(operation, Limits(tokens=15)) == [operation]


def test_more_tokens_than_a_cycle_takes_are_split_between_datums():
    assert lengths_of(encoding.split(batch(5, 5, 5), Limits(tokens=10))) == [[5, 5], [5]]
    assert lengths_of(encoding.split(batch(4, 7, 3), Limits(tokens=10))) == [[4], [7, 3]]


def test_a_datum_above_the_budget_is_a_part_of_its_own():
    assert lengths_of(encoding.split(batch(3, 50, 3), Limits(tokens=10))) == [[3], [50], [3]]


def test_a_datum_above_the_payload_limit_is_refused_before_anything_is_sent():
    with pytest.raises(PayloadTooLarge, match="datum 1") as caught:
        encoding.split(batch(3, 5000, 3), Limits(payload_bytes=4000))
    assert caught.value.details["datum"] == 1


@given(
    st.lists(st.integers(0, 300), max_size=30),
    st.one_of(st.none(), st.integers(1, 500)),
    st.one_of(st.none(), st.integers(4000, 8000)),
)
def test_parts_keep_the_order_and_the_limits(lengths, tokens, payload_bytes):
    whole = batch(*lengths)
    parts = encoding.split(whole, Limits(tokens, payload_bytes))
    for part in parts:
        assert payload_bytes is None or len(wire.encode_operation(part)) <= payload_bytes
        assert tokens is None or part.token_count <= tokens or len(part.tokens.lengths) == 1
    for name in ("tokens", "target_tokens"):
        jagged = [part.tokens if name == "tokens" else part.inputs.get(name) for part in parts]
        expected = whole.tokens if name == "tokens" else whole.inputs.get(name)
        if expected is None:
            continue
        np.testing.assert_array_equal(np.concatenate([each.values for each in jagged]), expected.values)
        np.testing.assert_array_equal(np.concatenate([each.lengths for each in jagged]), expected.lengths)


# -- results ----------------------------------------------------------------------------------------------------------


def result(logprobs, lengths):
    values = np.array(logprobs, np.float32)
    metrics = {"loss_sum": -float(values.sum()), "loss_mean": 0.0, "token_count": len(values)}
    return {"logprobs": values, "lengths": np.array(lengths, np.int32), "metrics": metrics}


def test_outputs_are_cut_by_datum():
    output = encoding.join_outputs([result([-1, -2, -3], [2, 0, 1])])
    assert [each["logprobs"].tolist() for each in output.loss_fn_outputs] == [[-1.0, -2.0], [], [-3.0]]


def test_parts_are_joined_in_order_and_their_sums_added():
    output = encoding.join_outputs([result([-1, -2], [2]), result([-6], [1])])
    assert [each["logprobs"].tolist() for each in output.loss_fn_outputs] == [[-1.0, -2.0], [-6.0]]
    assert output.metrics == {"loss_sum": 9.0, "loss_mean": 3.0, "token_count": 3}


def test_a_mean_over_nothing_is_zero():
    assert encoding.join_outputs([result([], []), result([], [])]).metrics["loss_mean"] == 0.0
