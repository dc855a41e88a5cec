"""The base model's tokenizer. The one file of the client that needs transformers, and only when it is called."""

from __future__ import annotations

import os
from typing import Any

from mainspring_broker import base_models


def load_tokenizer(base_model: str, base_model_path: str) -> Any:
    """The tokenizer (transformers) of a pool's base model. Local files are tried first, then the hub.

    Args:
        base_model: its name: of a shipped model, or a hub id.
        base_model_path: where workers have it; used when that folder is on this machine too.

    Raises:
        ImportError: transformers is not installed.
        OSError: there is no tokenizer of that name.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError("get_tokenizer() needs transformers: pip install transformers") from error
    where = base_models.resolve(base_model)
    if where == base_model and os.path.isdir(base_model_path):
        where = base_model_path
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=True)
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(where)
