"""The key schema: one table, one function a key, and no other file that spells a key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring_broker import keys, library
from tests.conftest import LASTING, schema

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = {
    "pool": "pool",
    "tenant_name": "<tenant>",
    "worker_name": "<w>",
    "job_name": "<job>",
    "seq": "<seq>",
}
NAMES = {"worker": "<w>", "worker_batches": "<w>", "worker_fair": "<w>", "worker_jobs": "<w>", "tenant": "<tenant>",
         "job": "<job>"}  # fmt: skip
PREFIXES = {"prefix", "tenant"}  # begin keys, and are none
FUNCTIONS: dict[str, Callable[..., str]] = {
    name: value
    for name, value in vars(keys).items()
    if inspect.isfunction(value) and value.__module__ == keys.__name__ and name != "check_name"
}


def spelled(name: str) -> str:
    """The key of a function with the placeholders of the table as its arguments."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    return FUNCTIONS[name](*(NAMES[name] if p == "name" else PLACEHOLDERS[p] for p in parameters))


def test_each_function_is_a_row_of_the_table_and_each_row_a_function() -> None:
    functions = {spelled(name) for name in FUNCTIONS if name not in PREFIXES}
    assert functions == {row.key for row in schema()}


def test_each_row_matches_its_own_key_and_no_other() -> None:
    for name in FUNCTIONS:
        if name in PREFIXES:
            continue
        parameters = inspect.signature(FUNCTIONS[name]).parameters
        key = FUNCTIONS[name](*(7 if p == "seq" else f"a.{p}-1" for p in parameters))
        assert [row.key for row in schema() if row.pattern.fullmatch(key)] == [spelled(name)]


def test_each_row_says_how_its_key_ends() -> None:
    for row in schema():
        assert row.type in {"hash", "list", "set", "stream", "string", "zset", "channel"}
        if row.type != "channel":
            assert LASTING.match(row.expires) or row.expires.endswith("_ms"), row


def test_the_column_written_by_names_functions() -> None:
    known = {name for name in library.sources() if not name.startswith("_")} | {"the clock", "…"}
    for line in (keys.__doc__ or "").splitlines():
        if line.startswith("    ms:"):
            writers = re.split(
                r"\s{2,}", re.sub(r"^(\S+\s+)(hash|list|set|stream|string|zset|channel)\s+", "", line.strip())
            )
            assert set(writers[1].split(", ")) <= known, line


def test_all_keys_of_a_pool_share_one_hash_slot() -> None:
    for name in FUNCTIONS:
        assert spelled(name).startswith("ms:{pool}:")


def test_all_a_tenant_touches_begins_with_its_prefix() -> None:
    for name, function in FUNCTIONS.items():
        if "tenant_name" in inspect.signature(function).parameters:
            assert spelled(name).startswith(keys.tenant("pool", "<tenant>"))


@pytest.mark.parametrize("package", ["broker", "clock", "workers", "sdk", "ops"])
def test_no_other_python_file_spells_a_key(package: str) -> None:
    guilty = [
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"""["']ms:""", path.read_text("utf-8")) and path.name != "keys.py"
    ]
    assert guilty == []


def test_lua_files_derive_every_key_from_the_first_one_they_are_given() -> None:
    for name, text in library.sources().items():
        code = "\n".join(line.split("--")[0] for line in text.splitlines())
        assert "ms:" not in code, name


@pytest.mark.parametrize("name", ["a", "A1", "0", "a.b_c-d", "x" * 100])
def test_a_good_name_is_returned(name: str) -> None:
    assert keys.check_name("job", name) == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "_a", "a:b", "a b", "a\n", "{a}", "a/b", "ä", "x" * 101, "a*"])
def test_a_bad_name_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"tenant .*: use 1 to 100 letters"):
        keys.check_name("tenant", name)


@given(st.text(max_size=30))
def test_a_name_that_passes_cannot_leave_its_place_in_a_key(name: str) -> None:
    try:
        keys.check_name("job", name)
    except ValueError:
        return
    assert not set(name) & set(":{}*?[]/ \n")
