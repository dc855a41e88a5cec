"""Which base models can be served, and what is known about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mainspring_broker.wire import Init
from mainspring_workers.base_model import BaseModel
from mainspring_workers.fused_linear import FusedLinear
from tests.tiny import FAMILIES, MAX_LENGTH, VOCAB, Driver, batch, optim, random_datums, tiny_base, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_and_facts(family: str) -> None:
    base = tiny_base(family)
    per_layer = 4 if family == "gpt_neox" else 7
    assert len(base.targets) == 2 * per_layer + 1
    assert base.targets[-1].kind == "unembed"
    assert sum(isinstance(m, FusedLinear) for m in base.model.modules()) == 2 * per_layer
    assert not any(p.requires_grad for p in base.model.parameters())
    assert base.facts["vocab_size"] == VOCAB
    assert base.facts["max_length"] == MAX_LENGTH
    assert base.facts["base_model"] == f"tiny-{family}"


def test_layers_that_read_one_input_are_found_by_watching() -> None:
    llama, neox = tiny_base(), tiny_base("gpt_neox")
    groups: dict[int, list[str]] = {}
    for target in llama.targets[:7]:
        groups.setdefault(target.reads, []).append(target.suffix)
    assert list(groups.values()) == [
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    assert [target.reads for target in neox.targets] == list(range(9))
    assert llama.context.trace is None


def test_loading_from_a_directory(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    base = BaseModel.load(str(tmp_path))
    assert base.path == str(tmp_path)
    assert base.dtype == torch.float32
    for mine, original in zip(base.model.parameters(), tiny_model("qwen3").parameters(), strict=True):
        assert mine.equal(original)


def test_a_bfloat16_base_with_float32_adapters(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    results = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(BaseModel.load(str(tmp_path), dtype=dtype))
        assert driver.engine.facts["dtype"] == dtype
        driver.good(("a", Init(rank=8, seed=1)), ("b", Init(rank=4, seed=2)))
        for update in range(3):
            results.append(
                driver.good(
                    ("a", batch(random_datums(update, [9, 9]))),
                    ("b", batch(random_datums(update, [7]))),
                    ("a", optim(1e-2)),
                    ("b", optim(1e-2)),
                )
            )
        assert driver.adapter("a").weights.dtype == torch.float32
    for full, half in zip(results[:3], results[3:], strict=True):
        np.testing.assert_allclose(half[0]["logprobs"], full[0]["logprobs"], atol=0.2)
        assert half[2]["metrics"]["grad_norm"] == pytest.approx(full[2]["metrics"]["grad_norm"], rel=0.05)


def test_a_model_whose_logits_are_not_hidden_times_weight_is_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=0.5,
    )
    model = transformers.Gemma2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    with pytest.raises(ValueError, match="packed logits differ"):
        BaseModel(model, name="gemma2", path="gemma2")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_the_longest_sequence_stay_below_their_switch(rope_type: str) -> None:
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 12
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    base = tiny_base(rope_parameters=parameters)
    assert base.max_length == 12
