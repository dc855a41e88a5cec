"""Adapters as bytes, in PEFT's own format, so that `PeftModel.from_pretrained(base, directory)` loads them.

    adapter_config.json          rank, alpha, names of the adapted linear maps
    adapter_model.safetensors    base_model.model.<target>.lora_A.weight [R, I] and .lora_B.weight [O, R], float32
    optimizer.safetensors        the same names with .exp_avg and .exp_avg_sq behind them, and `step`; PEFT ignores it

Written by hand rather than by PEFT: an adapter here is a row of a table, not a module. On a model with tied embeddings
only the LoRA of the head is written, not (as PEFT would) the whole embedding; PEFT loads it to the same logits, but
warns that merging the two needs untying.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from mainspring_workers.adapters import Adapter

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
_PREFIX = "base_model.model."
_MOMENTS = ("exp_avg", "exp_avg_sq")

Matrices = Mapping[str, tuple[Tensor, Tensor]]  # target name → A [R, I], B [O, R]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Adam's memory of one adapter."""

    exp_avg: Matrices
    exp_avg_sq: Matrices
    step: Tensor  # float32 scalar: steps applied


def config_bytes(adapter: Adapter, base_model: str) -> bytes:
    """adapter_config.json. `base_model` is what PEFT shall find the base model under."""
    alpha = adapter.init.alpha
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.layout.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({target.suffix for target in adapter.layout.targets}),
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def weights_bytes(adapter: Adapter) -> bytes:
    """adapter_model.safetensors."""
    return bytes(save(_tensors(adapter.named_matrices), metadata={"format": "pt"}))


def optimizer_bytes(adapter: Adapter) -> bytes:
    """optimizer.safetensors."""
    tensors = {"step": adapter.step.detach().cpu()}
    for moment in _MOMENTS:
        tensors |= _tensors(adapter.layout.named(getattr(adapter, moment)), "." + moment)
    return bytes(save(tensors))


def read_weights(data: bytes) -> Matrices:
    """What `weights_bytes` wrote.

    Raises:
        ValueError: it is something else.
    """
    return _matrices(_load(data))


def read_optimizer(data: bytes) -> OptimizerState:
    """What `optimizer_bytes` wrote. Raises as `read_weights`."""
    tensors = _load(data)
    if "step" not in tensors or tensors["step"].shape != torch.Size([]):
        raise ValueError("there is no step count")
    first, second = (_matrices(tensors, "." + moment) for moment in _MOMENTS)
    return OptimizerState(first, second, tensors["step"])


def _load(data: bytes) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load(data)
    except Exception as error:  # safetensors raises its own type, and torch others
        raise ValueError(f"not safetensors: {error}") from None
    return tensors


def _tensors(matrices: Matrices, ending: str = "") -> dict[str, Tensor]:
    tensors = {}
    for name, pair in matrices.items():
        for letter, matrix in zip("AB", pair, strict=True):
            tensors[f"{_PREFIX}{name}.lora_{letter}.weight{ending}"] = matrix.detach().cpu().contiguous()
    return tensors


def _matrices(tensors: Mapping[str, Tensor], ending: str = "") -> Matrices:
    first, second = (f".lora_{letter}.weight{ending}" for letter in "AB")
    stems = [key.removesuffix(first) for key in tensors if key.startswith(_PREFIX) and key.endswith(first)]
    try:
        return {stem.removeprefix(_PREFIX): (tensors[stem + first], tensors[stem + second]) for stem in stems}
    except KeyError as error:
        raise ValueError(f"there is no {error}") from None
