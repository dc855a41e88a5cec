"""Exported adapters load in stock PEFT to the same logits; names are checked, and a saved one never changes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from mainspring_broker import errors
from mainspring_broker.wire import Init, SaveState, SaveWeights
from mainspring_workers.peft_format import read_weights
from tests.oracle import peft_on_new_transformers
from tests.tiny import FAMILIES, Driver, batch, optim, random_datums, tiny_base, tiny_model


def trained(storage: Path, init: Init, family: str = "llama", tied: bool = False) -> Driver:
    driver = Driver(tiny_base(family, tied=tied), storage)
    driver.good(("t/job", init))
    for update in range(3):
        driver.good(("t/job", batch(random_datums(update, [9, 4]))), ("t/job", optim(5e-2)))
    return driver


@pytest.mark.parametrize(("save", "kind"), [(SaveState, "weights"), (SaveWeights, "sampler_weights")])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "init",
    [
        Init(rank=8, seed=1),
        Init(rank=12, seed=1, train_mlp=False, train_unembed=False),
        Init(rank=3, seed=2, alpha=7.5),
    ],
)
def test_stock_peft_loads_it_to_the_same_logits(
    tmp_path: Path, family: str, init: Init, save: type[SaveWeights | SaveState], kind: str
) -> None:
    driver = trained(tmp_path, init, family)
    datums = random_datums(77, [11, 6])
    result, saved = driver.good(("t/job", batch(datums, backward=False)), ("t/job", save("step-3")))
    assert saved["path"] == f"mainspring://job/{kind}/step-3"
    directory = tmp_path / "t/job" / kind / "step-3"
    assert saved["location"] == str(directory)
    with peft_on_new_transformers():
        model = PeftModel.from_pretrained(tiny_model(family), directory)
    expected = []
    for datum in datums:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(datum.tokens).long()[None]).logits[0]
        targets = torch.from_numpy(datum.targets).long()
        logp = torch.log_softmax(logits, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        expected.append(torch.where(targets >= 0, logp, 0.0))
    np.testing.assert_allclose(result["logprobs"], torch.cat(expected).numpy(), atol=2e-6)
    assert saved["size_bytes"] == sum(p.stat().st_size for p in directory.iterdir() if p.name != "checkpoint.json")
    assert sum(p.numel() for n, p in model.named_parameters() if "lora_" in n) == driver.adapter("t/job").parameters


def test_tied_embeddings_write_only_lora(tmp_path: Path) -> None:
    init = Init(rank=8, seed=1, train_attn=False, train_mlp=False)
    driver = trained(tmp_path, init, tied=True)
    driver.good(("t/job", SaveWeights("x")))
    directory = tmp_path / "t/job/sampler_weights/x"
    assert list(read_weights((directory / "adapter_model.safetensors").read_bytes())) == ["lm_head"]
    with peft_on_new_transformers(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", ".*ensure_weight_tying")
        model = PeftModel.from_pretrained(tiny_model(tied=True), directory)
    lm_head = model.base_model.model.lm_head
    assert lm_head.lora_B["default"].weight.equal(driver.matrices("t/job")["lm_head"][1])


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    driver = trained(tmp_path, Init(rank=8, seed=1))
    driver.good(("t/job", SaveWeights("x")))
    directory = tmp_path / "t/job/sampler_weights/x"
    config = json.loads((directory / "adapter_config.json").read_text())
    matrices = read_weights((directory / "adapter_model.safetensors").read_bytes())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (8, 32, "tiny-llama")
    expected = driver.matrices("t/job")
    assert matrices.keys() == expected.keys()
    for name, pair in expected.items():
        assert all(got.equal(want) for got, want in zip(matrices[name], pair, strict=True))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "-x", "a b", "é", "x" * 201, "a\n", "a\x00"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    driver = trained(tmp_path, Init(rank=2, seed=1))
    (outcome,) = driver.run(("t/job", SaveWeights(name)))
    assert isinstance(outcome.error, errors.PayloadInvalid)
    assert not list(tmp_path.iterdir())


def test_a_saved_name_never_changes(tmp_path: Path) -> None:
    driver = trained(tmp_path, Init(rank=2, seed=1))
    driver.good(("t/job", SaveWeights("x" * 200)))
    file = tmp_path / "t/job/sampler_weights" / ("x" * 200) / "adapter_model.safetensors"
    before = file.read_bytes()
    driver.good(("t/job", batch(random_datums(9, [5]))), ("t/job", optim()))
    (outcome,) = driver.run(("t/job", SaveWeights("x" * 200)))
    assert isinstance(outcome.error, errors.CheckpointExists)
    assert file.read_bytes() == before
    driver.good(("t/job", SaveWeights("another")))
    assert sorted(p.name for p in file.parent.parent.iterdir()) == ["another", "x" * 200]


def test_storage_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    driver = trained(blocked, Init(rank=2, seed=1))
    (outcome,) = driver.run(("t/job", SaveWeights("x")))
    assert isinstance(outcome.error, errors.StorageFailed)


def test_a_job_name_cannot_leave_the_storage(tmp_path: Path) -> None:
    driver = Driver(tiny_base(), tmp_path / "storage")
    (_, outcome) = driver.run(("../evil", Init(rank=2, seed=1)), ("../evil", SaveWeights("x")))
    assert isinstance(outcome.error, errors.StorageFailed)
    assert not list(tmp_path.iterdir())


def test_the_config_is_plain_json_with_peft_names(tmp_path: Path) -> None:
    driver = trained(tmp_path, Init(rank=8, seed=1, train_unembed=False), "gpt_neox")
    driver.good(("t/job", SaveWeights("x")))
    config = json.loads((tmp_path / "t/job/sampler_weights/x/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["target_modules"] == ["attention.dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]
