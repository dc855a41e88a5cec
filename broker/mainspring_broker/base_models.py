"""Base models that ship inside the package, by name, so that a first run downloads nothing."""

from __future__ import annotations

from importlib.resources import files

SHIPPED: dict[str, str] = {"mainspring-tiny": "models/tiny"}
"""Name users give -> folder inside this package (weights, configuration, tokenizer)."""


def resolve(name: str) -> str:
    """The folder of a shipped model; any other name (a path or a hub id) comes back unchanged.

    The result is what ``from_pretrained`` of transformers takes.
    """
    folder = SHIPPED.get(name)
    if folder is None:
        return name
    return str(files("mainspring_broker").joinpath(folder))
