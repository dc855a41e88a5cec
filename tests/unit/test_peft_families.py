"""An export of every supported family, with every set of flags, loads in stock PEFT: no warning, and equal logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn

from mainspring_broker import errors
from mainspring_broker.wire import Init, SaveWeights
from mainspring_workers.base_model import BaseModel
from tests.oracle import peft_on_new_transformers
from tests.tiny import FAMILIES, VOCAB, Datum, Driver, batch, optim, peft_targets, random_datums, tiny_base, tiny_model

FLAGS = [flags for flags in product([True, False], repeat=3) if any(flags)]


def init_of(attn: bool, mlp: bool, unembed: bool) -> Init:
    return Init(rank=4, seed=1, train_attn=attn, train_mlp=mlp, train_unembed=unembed)


def all_logprobs(driver: Driver, job: str, tokens: np.ndarray) -> np.ndarray:
    """[length, vocabulary]: the same sequence with each token of the vocabulary as the target of all positions."""
    ones = np.ones(len(tokens), np.float32)
    datums = [Datum(tokens, np.full(len(tokens), target, np.int32), ones) for target in range(VOCAB)]
    (result,) = driver.good((job, batch(datums, backward=False)))
    logprobs: np.ndarray = result["logprobs"].reshape(VOCAB, len(tokens)).T
    return logprobs


@contextmanager
def no_warning_but_the_one_for_tied_heads(tied_head: bool) -> Iterator[None]:
    """PEFT says of every LoRA on a tied head that merging it needs untying; it loads all the same."""
    with peft_on_new_transformers(), warnings.catch_warnings():
        if tied_head:
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`", UserWarning)
            warnings.filterwarnings("ignore", ".*ensure_weight_tying", UserWarning)
        yield


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_set_of_flags_loads_in_stock_peft_to_the_same_logits(tmp_path: Path, family: str, tied: bool) -> None:
    jobs = {f"t/job{i}": init_of(*flags) for i, flags in enumerate(FLAGS)}
    driver = Driver(tiny_base(family, tied=tied), tmp_path)
    driver.good(*jobs.items())
    for update in range(2):
        requests = [r for job in jobs for r in ((job, batch(random_datums(update, [9, 4]))), (job, optim(5e-2)))]
        driver.good(*requests)
    driver.good(*[(job, SaveWeights("x")) for job in jobs])
    tokens = random_datums(7, [8])[0].tokens
    base = torch.log_softmax(tiny_model(family, tied=tied)(torch.from_numpy(tokens).long()[None]).logits[0], -1)
    for job, init in jobs.items():
        with no_warning_but_the_one_for_tied_heads(tied and init.train_unembed):
            model = PeftModel.from_pretrained(tiny_model(family, tied=tied), tmp_path / job / "sampler_weights/x")
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0], -1)
        np.testing.assert_allclose(all_logprobs(driver, job, tokens), expected.numpy(), atol=1e-5)
        assert float((expected - base.detach()).abs().max()) > 0.1, "the adapter does nothing"
        config = model.peft_config["default"]
        assert sorted(config.target_modules) == sorted(peft_targets(family, init))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flag_that_matches_no_module_is_refused_and_the_others_work(family: str) -> None:
    """A model whose MLP is one that is not known: every linear map of it has another name."""
    model = tiny_model(family)
    known = ("gate_proj", "up_proj", "down_proj", "dense_h_to_4h", "dense_4h_to_h")
    for name, linear in [(n, m) for n, m in model.named_modules() if n.endswith(known)]:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Sequential(linear))  # its name now ends in ".0"
    driver = Driver(BaseModel(model, name="odd", path="odd"))
    for flags in FLAGS:
        (outcome,) = driver.run((f"job{flags}", init_of(*flags)))
        if flags[1]:
            assert isinstance(outcome.error, errors.InvalidHyperparameter)
            assert outcome.error.details["field"] == "train_mlp"
            assert "turn it off" in str(outcome.error)
        else:
            assert outcome.error is None
