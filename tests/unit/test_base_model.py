"""The base model that ships inside the package: loads without a network, and has learnt something."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from mainspring_broker import base_models

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="needs mainspring[workers]",
)

# From the topic "exceptions", which scripts/train_base_model.py held out.
UNSEEN = """Exceptions
**********

Exceptions are a means of breaking out of the normal flow of control
of a code block in order to handle errors or other exceptional
conditions.  An exception is *raised* at the point where the error is
detected; it may be *handled* by the surrounding code block or by any
code block that directly or indirectly invoked the code block where
the error occurred.

The Python interpreter raises an exception when it detects a run-time
error (such as division by zero).  A Python program can also
explicitly raise an exception with the "raise" statement. Exception
handlers are specified with the "try" … "except" statement.  The
"finally" clause of such a statement can be used to specify cleanup
code which does not handle the exception, but is executed whether an
exception occurred or not in the preceding code.
"""

ODD_TEXTS = [
    "",
    " ",
    "  two  spaces ,  and a dot .  don't  ",
    "\ttab\t\tand\r\nCRLF\n\n\n",
    "nul \x00 bell \x07 delete \x7f",
    "👩‍🚀🇪🇺 naïve Ωμέγα 日本語 \u202eright-to-left\u202c \ufeff",
    "e\u0301 is not \u00e9",
    "before<|end|>after",
    "".join(map(chr, range(256))),
    "\U0010ffff",
]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to connect fails loudly."""

    def refuse(*_: object) -> None:
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder() -> str:
    return base_models.resolve("mainspring-tiny")


@pytest.fixture
def tokenizer(folder: str, no_network: None) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_shipped_names_are_folders_that_hold_a_model() -> None:
    for name in base_models.SHIPPED:
        found = {path.name for path in Path(base_models.resolve(name)).iterdir()}
        assert found >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "/some/where", "./tiny", "", "mainspring-tiny/"])
def test_other_names_come_back_unchanged(name: str) -> None:
    assert base_models.resolve(name) == name


def test_weights_stay_small_enough_for_git(folder: str) -> None:
    assert (Path(folder) / "model.safetensors").stat().st_size < 4_000_000


@needs_torch
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_comes_back_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_torch
def test_tokenizer_fits_the_model(tokenizer: Any) -> None:
    assert tokenizer.is_fast
    assert len(tokenizer) == 1024
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token_id == 0
    # Nothing is put around a text: a datum holds exactly the tokens its author sees.
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)


@needs_torch
def test_knows_text_it_never_saw(folder: str, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(trained.config)
    assert sum(p.numel() for p in trained.parameters()) == sum(p.numel() for p in untrained.parameters())
    ids = torch.tensor([[0, *tokenizer.encode(UNSEEN)]])

    def loss(model: Any) -> float:
        """Mean nats per token over ``UNSEEN``."""
        with torch.no_grad():
            logits = model.eval()(input_ids=ids[:, :-1]).logits[0]
        return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))

    assert loss(untrained) > 6.5  # ln 1024 = 6.93: an untrained model guesses
    assert loss(trained) < 0.6 * loss(untrained)
