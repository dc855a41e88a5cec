"""Adapters on disk, in PEFT's own format, so that `PeftModel.from_pretrained(base, directory)` loads them.

    adapter_config.json          rank, alpha, names of the adapted linear maps
    adapter_model.safetensors    base_model.model.<target>.lora_A.weight [R, I] and .lora_B.weight [O, R], float32

Written by hand rather than by PEFT: an adapter here is a row of a table, not a module. On a model with tied embeddings
only the LoRA of the head is written, not (as PEFT would) the whole embedding; PEFT loads it to the same logits, but
warns that merging the two needs untying.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mainspring_broker.errors import CheckpointExists, PayloadInvalid
from mainspring_workers.adapters import Adapter

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_adapter(adapter: Adapter, parent: Path, name: str, base_model: str) -> Path:
    """Write the adapter to `parent`/`name`, which then never changes. It appears whole or not at all.

    Args:
        base_model: what PEFT shall find the base model under.

    Raises:
        PayloadInvalid: `name` is not 1 to 200 letters, digits, '.', '_' or '-', a letter or digit first.
        CheckpointExists: the name was saved before.
        OSError: the disk is full, …
    """
    if not NAME.fullmatch(name):
        message = (
            f"{name[:100]!r} is no checkpoint name: 1 to 200 letters, digits, '.', '_', '-'; not '.', '_', '-' first"
        )
        raise PayloadInvalid(message, field="name", limit=200)
    final = parent / name
    exists = CheckpointExists(f"{name!r} was saved before, and a saved checkpoint never changes: use another name")
    if final.exists():
        raise exists
    parent.mkdir(parents=True, exist_ok=True)
    temporary = parent / f".{uuid.uuid4().hex}.tmp"  # no checkpoint name starts with a dot
    temporary.mkdir()
    try:
        (temporary / CONFIG_FILE).write_text(json.dumps(_config(adapter, base_model), indent=2) + "\n")
        save_file(_tensors(adapter), temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        for path in (temporary / CONFIG_FILE, temporary / WEIGHTS_FILE, temporary):
            _fsync(path)
        try:
            temporary.rename(final)
        except OSError:
            if final.exists():  # somebody else was faster
                raise exists from None
            raise
        _fsync(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def read_adapter(directory: Path) -> tuple[dict[str, Any], dict[str, tuple[Tensor, Tensor]]]:
    """The configuration, and by target name A [R, I] and B [O, R], of a directory that `save_adapter` wrote."""
    config = json.loads((directory / CONFIG_FILE).read_text())
    tensors = load_file(directory / WEIGHTS_FILE)
    suffix = ".lora_A.weight"
    names = [key.removeprefix(_PREFIX).removesuffix(suffix) for key in tensors if key.endswith(suffix)]
    matrices = {
        name: (tensors[f"{_PREFIX}{name}.lora_A.weight"], tensors[f"{_PREFIX}{name}.lora_B.weight"]) for name in names
    }
    return config, matrices


def _config(adapter: Adapter, base_model: str) -> dict[str, Any]:
    alpha = adapter.init.alpha
    return {
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


def _tensors(adapter: Adapter) -> dict[str, Tensor]:
    tensors = {}
    for name, (a, b) in adapter.named_matrices.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.detach().cpu().contiguous()
    return tensors


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
