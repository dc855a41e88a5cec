"""Values that users make: from whatever they have, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mainspring as trio
from mainspring.settings import ClientSettings


@pytest.mark.parametrize(
    "data", [[1.0, 2.5], (1.0, 2.5), np.array([1.0, 2.5]), torch.tensor([1.0, 2.5]), trio.TensorData([1.0, 2.5])]
)
def test_tensor_data_comes_from_anything_and_becomes_anything(data):
    tensor = trio.TensorData(data)
    assert tensor.tolist() == [1.0, 2.5]
    assert tensor.shape == (2,)
    assert len(tensor) == 2
    np.testing.assert_array_equal(tensor.numpy(), [1.0, 2.5])
    torch.testing.assert_close(tensor.torch().double(), torch.tensor([1.0, 2.5]).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tensors_become_float32(dtype):
    assert trio.TensorData(torch.tensor([0.5, 2.0], dtype=dtype)).dtype == "float32"


def test_a_tensor_with_a_gradient_is_taken_as_data():
    assert trio.TensorData(torch.tensor([1.0], requires_grad=True)).tolist() == [1.0]


def test_what_tensor_data_gives_may_be_written_to_without_changing_it():
    tensor = trio.TensorData(np.frombuffer(np.float32([1, 2]).tobytes(), np.float32))  # read-only, as results are
    tensor.numpy()[0] = 7
    tensor.torch()[0] = 7
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("tokens", [[3, 1, 2], np.array([3, 1, 2], np.uint16), torch.tensor([3, 1, 2])])
def test_model_input_from_ints(tokens):
    model_input = trio.ModelInput.from_ints(tokens)
    assert model_input.length == 3
    assert model_input.to_ints() == [3, 1, 2]


def test_datum_keeps_its_inputs_as_tensor_data():
    weights = trio.TensorData([1.0])
    datum = trio.Datum(trio.ModelInput.from_ints([1]), {"target_tokens": [2], "weights": weights})
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2]
    assert datum.loss_fn_inputs["weights"] is weights


def test_adam_params_have_the_defaults_that_people_know():
    assert trio.AdamParams() == trio.AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )


def test_reprs_say_what_is_inside_and_stay_short():
    datum = trio.Datum(trio.ModelInput.from_ints(list(range(10_000))), {"target_tokens": list(range(10_000))})
    assert "length=10000" in repr(datum)
    assert "target_tokens" in repr(datum)
    assert len(repr(datum)) < 200
    assert "float64" in repr(trio.TensorData([0.5]))


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MAINSPRING_URL", "redis://elsewhere:1/0")
    monkeypatch.setenv("MAINSPRING_TENANT", "acme")
    assert "elsewhere" in repr(trio.ServiceClient())
    assert "acme" in repr(trio.ServiceClient())
    assert "own" in repr(trio.ServiceClient(tenant="own"))
    assert ClientSettings().pool == "main"


def test_a_password_is_not_shown():
    assert "secret" not in repr(trio.ServiceClient("redis://user:secret@localhost:1/0"))


def test_an_unusable_setting_is_refused_at_once():
    with pytest.raises(ValueError, match="tenant"):
        trio.ServiceClient(tenant="a:b")
    with pytest.raises(ValueError, match="poll_interval_s"):
        trio.ServiceClient(poll_interval_s=0)
    with pytest.raises(TypeError, match="no_such"):
        trio.ServiceClient(no_such=1)
