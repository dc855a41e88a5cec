"""The Redis function library: one `.lua` file an operation, joined into one versioned library and loaded as a whole.

Each file is wrapped in `do … end` behind the prelude, so that local helpers of two files never collide. The version is a
hash of the text: a process that was built with other functions notices at once.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Any

import redis
from redis.exceptions import ResponseError

from mainspring_broker.errors import LibraryMismatch, LibraryMissing, ServerUnsupported

LIBRARY = "mainspring"
MIN_REDIS = (7, 0)
MIN_VALKEY = (8, 0)


@functools.cache
def sources() -> dict[str, str]:
    """Text of each Lua file, by its name without the ending; the prelude first."""
    folder = resources.files("mainspring_broker") / "lua"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return {name.removesuffix(".lua"): (folder / name).read_text("utf-8") for name in names}


@functools.cache
def version() -> str:
    """12 hex digits over the text of all files."""
    text = "\0".join(f"{name}\0{body}" for name, body in sources().items())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code() -> str:
    """The whole library, as `FUNCTION LOAD` takes it."""
    return _head() + "".join(_wrapped(name, body) for name, body in sources().items())


def _head() -> str:
    return f'#!lua name={LIBRARY}\nlocal VERSION = "{version()}"\n'


def _wrapped(
    name: str, body: str
) -> str:  # `do ` adds no line, so that a line of the library is easily found in its file
    return body + "\n" if name.startswith("_") else f"do {body}\nend\n"


def locate(line: int) -> str:
    """Where a line of the whole library, as the server's errors count it, comes from: "tick.lua:17"."""
    first = _head().count("\n") + 1
    for name, body in sources().items():
        lines = _wrapped(name, body).count("\n")
        if first <= line < first + lines:
            return f"{name}.lua:{line - first + 1}"
        first += lines
    return f"line {line}"


def check_server(client: redis.Redis) -> str:
    """The server's name and version.

    Raises:
        ServerUnsupported: older than Redis 7.0 or Valkey 8, which lack functions.
    """
    server: dict[str, Any] = client.info("server")
    if "valkey_version" in server:
        name, text, least = "Valkey", str(server["valkey_version"]), MIN_VALKEY
    else:
        name, text, least = "Redis", str(server["redis_version"]), MIN_REDIS
    found = tuple(int(part) for part in text.split(".")[:2])
    if found < least:
        raise ServerUnsupported(
            f"{name} {text} is too old: Mainspring needs Redis 7.0 or Valkey 8 (Lua function libraries)",
            server=name,
            version=text,
        )
    return f"{name} {text}"


def load(client: redis.Redis) -> str:
    """Load this version of the library, replacing any other. Returns its version."""
    check_server(client)
    client.function_load(code(), replace=True)
    return version()


def loaded_version(client: redis.Redis, info_key: str) -> str:
    """The version of the library on the server.

    Raises:
        LibraryMissing: none is loaded.
    """
    try:
        return bytes(client.fcall_ro("ms_version", 1, info_key)).decode()
    except ResponseError as error:
        if "not found" in str(error).lower():
            raise LibraryMissing(
                "the function library is not on the server: start a clock (mainspring clock)"
            ) from None
        raise


def check_version(found: str) -> None:
    """Raises LibraryMismatch unless `found` is the version of this process."""
    if found != version():
        raise LibraryMismatch(
            f"the server runs function library {found}, this process was built with {version()}: "
            "upgrade so that clock, workers and clients are of one version",
            server=found,
            process=version(),
        )
