"""Where the tokenizer of a base model comes from."""

from __future__ import annotations

import sys

import pytest

from mainspring.tokenizer import load_tokenizer
from mainspring_broker import base_models


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer that knows two words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"clock": 0, "cycle": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_base_model_in_a_folder(folder):
    assert load_tokenizer(folder, folder).encode("cycle clock") == [1, 0]


def test_the_workers_folder_is_used_when_it_is_on_this_machine_too(folder):
    assert load_tokenizer("some-name", folder).encode("clock") == [0]


def test_a_shipped_model_is_found_by_its_name(folder, monkeypatch):
    monkeypatch.setattr(base_models, "resolve", lambda name: folder if name == "mainspring-tiny" else name)
    assert load_tokenizer("mainspring-tiny", "/on/the/workers/machine").encode("clock") == [0]


def test_without_transformers_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        load_tokenizer(folder, folder)
