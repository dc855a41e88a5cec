"""What `redis-cli COMMAND` prints to a person, for machines without redis-cli and for checking the outputs in docs.

Only plain commands. As a program: `python -m tests.redis_cli [-u URL | -p PORT] COMMAND…`.
"""

from __future__ import annotations

import sys
from typing import Any

import redis
from redis.exceptions import ResponseError


def run(client: redis.Redis, words: list[str]) -> str:
    """The reply in redis-cli's format for a terminal."""
    connection: Any = client.connection_pool.get_connection()
    try:
        connection.send_command(*words)
        return show(connection.read_response())
    except ResponseError as error:
        return f"(error) {error}"
    finally:
        client.connection_pool.release(connection)


def show(reply: Any, indent: str = "") -> str:
    """A reply of protocol 2, before redis-py makes Python values of it."""
    if reply is None:
        return "(nil)"
    if isinstance(reply, int):
        return f"(integer) {reply}"
    if isinstance(reply, list):
        width = len(str(len(reply)))
        lines = []
        for number, item in enumerate(reply, 1):
            head = f"{number:>{width}}) "
            lines.append(head + show(item, indent + " " * len(head)))
        return f"\n{indent}".join(lines) if reply else "(empty array)"
    text = reply.decode("latin-1") if isinstance(reply, bytes) else str(reply)
    return text if text in ("OK", "PONG") or text in STATUSES else quote(text)


STATUSES = {"hash", "string", "list", "set", "zset", "stream", "none"}  # replies that carry no quotes


def quote(text: str) -> str:
    """As redis-cli shows a string: in double quotes, what cannot be printed as \\x escapes."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\a": "\\a", "\b": "\\b"}
    return (
        '"' + "".join(escapes.get(c, c if c.isascii() and c.isprintable() else f"\\x{ord(c):02x}") for c in text) + '"'
    )


def main() -> None:
    words = sys.argv[1:]
    url = "redis://127.0.0.1:6379/0"
    while words and words[0] in ("-u", "-p"):
        url = words[1] if words[0] == "-u" else f"redis://127.0.0.1:{words[1]}/0"
        words = words[2:]
    with redis.Redis.from_url(url, protocol=2) as client:
        print(run(client, words))


if __name__ == "__main__":
    main()
