"""`mainspring inspect`: any key of a pool, decoded for a person."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer

from mainspring_broker import keys
from mainspring_ops.terminal import DEFAULT_URL, CommandFailed, Pool, Url, console, open_view

MAX_ENTRIES = 20  # of a stream, list, set or sorted set
HEAD = 6  # values shown of a tensor
MAX_TEXT = 400


def inspect(
    key: Annotated[str, typer.Argument(help="The key; what follows ms:{pool}: is enough.")],
    seq: Annotated[str | None, typer.Argument(help="Of a stream: only this entry, by seq, cycle or whole id.")] = None,
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
) -> None:
    """Decode a key: result envelopes, request payloads, batches, hashes, lists and sets.

    Tensors are shown as dtype, shape and their first values. Of long streams, lists and sets the last entries are shown.
    Examples: `mainspring inspect clock`, `mainspring inspect t:default:job:ID:requests 3`.
    """
    out = console()
    with open_view(url, pool) as view:
        full = keys.prefix(pool) + key.removeprefix(keys.prefix(pool))
        kind = view.client.type(full).decode()
        if kind == "none":
            raise CommandFailed(
                f"there is no key {full} (never written, expired, or ended); docs/keys.md lists all keys"
            )
        out.print(f"{full}  {kind}", markup=False)
        for text in _READERS[kind](view.client, full, seq) or ["(empty)"]:
            out.print(text, markup=False, soft_wrap=True)


# `client` is a redis.Redis; it is Any because redis-py types each reply as bytes | str, and here they are always bytes.


def _string(client: Any, key: str, _: str | None) -> list[str]:
    from mainspring_broker.wire import decode_envelope

    data = client.get(key) or b""
    if ":result:" not in key:
        return [_text(data)]
    return show(decode_envelope(data))


def _hash(client: Any, key: str, _: str | None) -> list[str]:
    pairs = sorted(client.hgetall(key).items())
    return [line for name, value in pairs for line in show(_json(value), name.decode())]


def _list(client: Any, key: str, _: str | None) -> list[str]:
    length = client.llen(key)
    return [_text(item) for item in client.lrange(key, 0, MAX_ENTRIES - 1)] + _more(length)


def _set(client: Any, key: str, _: str | None) -> list[str]:
    _cursor, members = client.sscan(key, count=MAX_ENTRIES)
    return [_text(member) for member in sorted(members)[:MAX_ENTRIES]] + _more(client.scard(key))


def _zset(client: Any, key: str, _: str | None) -> list[str]:
    pairs = client.zrange(key, 0, MAX_ENTRIES - 1, withscores=True)
    return [f"{float(score):g}  {_text(member)}" for member, score in pairs] + _more(client.zcard(key))


def _stream(client: Any, key: str, seq: str | None) -> list[str]:
    if seq is not None:
        entry_id = seq if "-" in seq else f"{seq}-0"
        entries = client.xrange(key, entry_id, entry_id)
        if not entries:
            raise CommandFailed(f"{key} has no entry {seq} (not accepted yet, or trimmed after it was done)")
        return _entry(*entries[0])
    entries = client.xrevrange(key, count=MAX_ENTRIES)
    lines = [line for entry in reversed(entries) for line in _entry(*entry, brief=len(entries) > 1)]
    return lines + _more(client.xlen(key))


_READERS = {"string": _string, "hash": _hash, "list": _list, "set": _set, "zset": _zset, "stream": _stream}


def _entry(entry_id: bytes, entry: dict[bytes, bytes], *, brief: bool = False) -> list[str]:
    values = {name.decode(): value for name, value in entry.items()}
    payload = values.pop("payload", None)
    if brief:
        words = [f"{name}={_text(value)[:48]}" for name, value in values.items()]
        words += [f"payload={len(payload)} bytes"] if payload is not None else []
        return [f"{entry_id.decode()}  {' '.join(words)}"]
    lines = [entry_id.decode()]
    lines += [line for name, value in values.items() for line in show(_json(value), name, depth=1)]
    if payload is not None:
        lines += _payload(values.get("op", b"").decode(), payload)
    return lines


def _payload(op: str, payload: bytes) -> list[str]:
    from mainspring_broker.errors import MainspringError
    from mainspring_broker.wire import decode_operation

    try:
        return show(decode_operation(op, payload), f"payload ({len(payload)} bytes)", depth=1)
    except MainspringError as error:
        return [f"  payload ({len(payload)} bytes) cannot be decoded: {error.message}"]


def show(value: Any, name: str = "", depth: int = 0) -> list[str]:
    """A value as indented lines, one a leaf: maps and dataclasses open up, tensors and long lists do not."""
    import numpy as np

    indent = "  " * depth
    label = f"{indent}{name}: " if name else indent
    if is_dataclass(value) and not isinstance(value, type):
        value = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    if isinstance(value, np.ndarray):
        return [label + tensor(value)]
    inner = depth + 1 if name else depth
    if isinstance(value, dict) and value:
        return ([label.rstrip()] if name else []) + [
            line for key, item in value.items() for line in show(item, str(key), inner)
        ]
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple | np.ndarray) for item in value):
        lines = [line for i, item in enumerate(value[:MAX_ENTRIES]) for line in show(item, f"[{i}]", inner)]
        more = [f"{'  ' * inner}… {len(value) - MAX_ENTRIES} more"] if len(value) > MAX_ENTRIES else []
        return ([label.rstrip()] if name else []) + lines + more
    return [label + _clip(value if isinstance(value, str) else repr(value))]


def tensor(array: Any) -> str:
    """dtype, shape and the first values: float32 [4] 0.1 0.2 0.3 0.4."""
    flat = array.reshape(-1)
    head = " ".join(f"{value:.4g}" if array.dtype.kind == "f" else str(value) for value in flat[:HEAD])
    return f"{array.dtype} {list(array.shape)} {head}{' …' if flat.size > HEAD else ''}"


def _json(value: bytes) -> Any:
    if value[:1] in (b"{", b"["):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return _text(value)


def _text(value: bytes) -> str:
    try:
        return _clip(value.decode())
    except UnicodeDecodeError:
        return f"{len(value)} bytes"


def _clip(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


def _more(length: int) -> list[str]:
    return [f"… {length} in all, {MAX_ENTRIES} shown"] if length > MAX_ENTRIES else []
