"""The built-in data sets: present on every Python, large enough, and of different kinds."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from importlib import import_module
from itertools import permutations

import pytest

from mainspring_ops import topics as module


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return module.topics()


def test_four_of_a_useful_size(texts: dict[str, str]) -> None:
    assert list(texts) == ["turtle", "decimal", "email", "entities"]
    assert all(len(text) >= 20_000 for text in texts.values()), {k: len(v) for k, v in texts.items()}


def test_same_every_time(texts: dict[str, str]) -> None:
    assert module.topics() == texts


def test_kinds_differ(texts: dict[str, str]) -> None:
    """A sample compresses better after its own kind of text than after any other kind."""

    def cost(sample: str, context: str) -> int:
        """Bytes that ``sample`` adds to a zlib stream after ``context``."""
        return len(zlib.compress((context + sample).encode(), 9)) - len(zlib.compress(context.encode(), 9))

    for own, other in permutations(texts, 2):
        sample = texts[own][14_000:15_000]
        assert cost(sample, texts[own][:14_000]) < cost(sample, texts[other][:14_000]), (own, other)


def test_not_what_the_base_model_was_trained_on(texts: dict[str, str]) -> None:
    reference = "\n".join(import_module("pydoc_data.topics").topics.values())
    seen = {" ".join(line.split()) for line in reference.splitlines()}
    for name, text in texts.items():
        lines = [" ".join(line.split()) for line in text.splitlines()]
        long = [line for line in lines if len(line) > 30] or lines
        assert sum(line in seen for line in long) < 0.01 * len(long), name


def test_reads_without_running_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """turtle needs Tk to be imported; its text must come without."""
    monkeypatch.setitem(sys.modules, "tkinter", None)
    monkeypatch.delitem(sys.modules, "turtle", raising=False)
    assert "turtle" in module._docstrings("turtle")


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="'turtle'"):
        module.topics()
