"""The library as a whole: loading, versions, and the headers of its files."""

from __future__ import annotations

import re

import pytest
from redis.exceptions import ResponseError

from mainspring_broker import functions, keys, library
from mainspring_broker.errors import LibraryMismatch, LibraryMissing, ServerUnsupported
from tests.conftest import Server
from tests.helpers import Scene

FILES = {name: text for name, text in library.sources().items() if not name.startswith("_")}


def test_loading_gives_the_version_that_the_server_then_reports(scene: Scene) -> None:
    assert library.load(scene.r) == library.version()
    assert library.loaded_version(scene.r, keys.info(scene.pool)) == library.version()
    library.check_version(library.version())


def test_loading_again_replaces_and_keeps_the_data(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update()
    library.load(scene.r)
    scene.tick()
    scene.commit()
    assert job.field("done_seq") == "2"


def test_a_file_for_each_function_and_a_function_for_each_file(scene: Scene) -> None:
    [loaded] = scene.r.function_list(library=library.LIBRARY)
    loaded = loaded if isinstance(loaded, dict) else dict(zip(loaded[::2], loaded[1::2], strict=True))
    found = set()
    for function in loaded[b"functions"]:
        fields = function if isinstance(function, dict) else dict(zip(function[::2], function[1::2], strict=True))
        found.add(fields[b"name"].decode())
    assert found == {f"ms_{name}" for name in FILES}


def test_another_version_is_noticed(scene: Scene) -> None:
    scene.r.function_load(library.code().replace(library.version(), "another"), replace=True)
    found = library.loaded_version(scene.r, keys.info(scene.pool))
    with pytest.raises(LibraryMismatch, match="upgrade") as caught:
        library.check_version(found)
    assert caught.value.details == {"server": "another", "process": library.version()}


def test_a_missing_library_is_a_typed_error(scene: Scene) -> None:
    scene.r.function_delete(library.LIBRARY)
    with pytest.raises(LibraryMissing, match="mainspring clock"):
        library.loaded_version(scene.r, keys.info(scene.pool))
    with pytest.raises(LibraryMissing, match="mainspring clock"):
        scene.lead()


async def test_the_asyncio_client_gets_the_same_replies_and_errors(scene: Scene, server: Server) -> None:
    import redis.asyncio

    call = functions.lead(pool=scene.pool, token="a", lease_ms=60_000, name="test")
    async with redis.asyncio.Redis.from_url(server.url) as client:
        assert await functions.run_async(client, call)
        scene.r.function_delete(library.LIBRARY)
        with pytest.raises(LibraryMissing):
            await functions.run_async(client, call)


class OldServer:
    def __init__(self, **info: str) -> None:
        self.facts = info

    def info(self, section: str) -> dict[str, str]:
        return self.facts


def test_old_servers_are_refused_by_name() -> None:
    with pytest.raises(ServerUnsupported, match=r"Redis 6\.2\.14 is too old"):
        library.check_server(OldServer(redis_version="6.2.14"))  # type: ignore[arg-type]
    with pytest.raises(ServerUnsupported, match=r"Valkey 7\.2\.5 is too old"):
        library.check_server(OldServer(redis_version="7.2.4", valkey_version="7.2.5"))  # type: ignore[arg-type]
    assert library.check_server(OldServer(redis_version="7.0.0")) == "Redis 7.0.0"  # type: ignore[arg-type]


def test_each_line_of_the_library_is_found_in_its_file() -> None:
    found = {library.locate(at): text.removeprefix("do ") for at, text in enumerate(library.code().splitlines(), 1)}
    for name, text in library.sources().items():
        for line, expected in enumerate(text.splitlines(), 1):
            assert found[f"{name}.lua:{line}"] == expected
    assert library.locate(1) == "line 1"
    assert library.locate(10**6) == "line 1000000"


def test_a_fault_in_a_function_names_file_and_line(scene: Scene) -> None:
    scene.lead()
    with pytest.raises(ResponseError) as caught:
        functions.run(scene.r, functions.Call("ms_tick", (keys.info(scene.pool),), (scene.token, "soon"), int))
    found = re.search(r"tick\.lua:(\d+)", str(caught.value))
    assert found
    assert "PEXPIRE" in library.sources()["tick"].splitlines()[int(found[1]) - 1]


# -- headers ----------------------------------------------------------------------------------------------------------


def numbers(pattern: str, text: str) -> set[int]:
    return {int(found) for found in re.findall(pattern, text)}


@pytest.mark.parametrize("name", FILES)
def test_the_header_says_what_the_body_does(name: str) -> None:
    lines = FILES[name].splitlines()
    header = [line for line in lines if line.startswith("-- ")][
        : next(n for n, s in enumerate(lines) if s[:3] != "-- ")
    ]
    text, body = "\n".join(header), "\n".join(lines[len(header) :])
    assert re.match(rf"-- {name}: \S.*\.$", header[0]), "the first line: name and purpose"
    assert re.search(r"^-- Returns ", text, re.M), "a line that says what it returns"
    assert re.search(r"^-- Atomic because ", text, re.M), "a line that says why it is atomic"

    used_keys = numbers(r"keys\[(\d+)\]", body) | {1}  # KEYS[1] at least routes the call
    assert numbers(r"KEYS\[(\d+)\]", text) == set(range(1, max(used_keys) + 1)), "KEYS declared = KEYS used"

    declared, rest = numbers(r"ARGV\[(\d+)\]", text), numbers(r"ARGV\[(\d+)…\]", text)
    used = numbers(r"args\[(\d+)\]", body) - rest
    if rest:
        assert "#args" in body, "a variable number of arguments is read by its length"
        assert declared == set(range(1, min(rest)))
    assert declared == set(range(1, max(used, default=0) + 1)), "ARGV declared = ARGV used"
    assert declared or "ARGV none" in text


@pytest.mark.parametrize("name", FILES)
def test_the_typed_call_sends_what_the_header_declares(name: str) -> None:
    calls = {
        "add_tenant": functions.add_tenant(pool="p", tenant="t"),
        "cancel": functions.cancel(pool="p", tenant="t", job="j", writer="w", seq=1),
        "commit": functions.commit(
            pool="p", worker="w", incarnation="i", batch="b", result_ttl_ms=1, timings={}, executed=[]
        ),
        "create_job": functions.create_job(
            pool="p", tenant="t", job="j", writer="w", base_model="m", rank=1, spec={}
        ),
        "heartbeat": functions.heartbeat(pool="p", worker="w", incarnation="i"),
        "lead": functions.lead(pool="p", token="t", lease_ms=1, name="n"),
        "register": functions.register(
            pool="p", worker="w", incarnation="i", slots=1, base_model="m", base_model_path="p", vocab_size=1,
            max_length=1, fields={},
        ),
        "requeue": functions.requeue(pool="p", worker="w"),
        "resign": functions.resign(pool="p", token="t", name="n"),
        "submit": functions.submit(
            pool="p", tenant="t", job="j", writer="w", seq=1, chain="c", op="o", tokens=1, digest="d", payload=b""
        ),
        "tick": functions.tick(
            pool="p", token="t", lease_ms=1, budget_tokens=1, dead_after_ms=1, history=1, batch_seed="s"
        ),
    }  # fmt: skip
    if name == "version":  # library.loaded_version calls it, before anything else is known of the server
        return
    call = calls[name]
    assert call.name == f"ms_{name}"
    # A tenant's client may write under its own prefix only, and to declare a key is to ask for writing it.
    tenants = name in ("create_job", "submit", "cancel")
    assert call.keys[0] == (keys.job("p", "t", "j") if tenants else keys.info("p"))
    assert len(call.keys) == max(numbers(r"KEYS\[(\d+)\]", FILES[name]))
    assert len(call.args) == max(numbers(r"ARGV\[(\d+)\]", FILES[name]))
