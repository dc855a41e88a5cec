"""Logs of the service's processes: one line an event, as text for people or as JSON for machines.

An event has a short message and named values: `log.info("cycle", extra=fields(cycle=7, ms=12.5))` is

    14:03:07 INFO    cycle cycle=7 ms=12.5                                                             as text
    {"time": "2026-01-31T14:03:07.123+00:00", "level": "INFO", …, "message": "cycle", "cycle": 7, "ms": 12.5}   as JSON
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
RESERVED = frozenset({"time", "level", "logger", "message", "traceback"})
PLAIN = re.compile(r"[^\s\"=]+")


def fields(**values: Any) -> dict[str, Any]:
    """The named values of an event, for `extra=` of a logging call."""
    if taken := RESERVED & values.keys():
        raise ValueError(f"an event has {', '.join(sorted(taken))} already")
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """Time, level, message, then name=value of each field; a value with spaces is quoted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        values = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={_word(value)}" for name, value in values.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _word(value: Any) -> str:
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log to stderr from here on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("redis").setLevel(logging.INFO)  # its debug lines are about features that we do not use


def hide_password(url: str) -> str:
    """The URL as it may be shown."""
    scheme, separator, rest = url.partition("://")
    login, at, host = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{host}"


class Trouble:
    """Something that goes wrong again and again, said once, then summed up, and said again when it is over.

    A server that is away for an hour makes a few lines a minute, however often its processes try.

    Args:
        what: who has the trouble, at the start of each line.
        every_s: least seconds between two lines about the same trouble.
        now: a steady clock in seconds.
    """

    def __init__(
        self, log: logging.Logger, what: str, *, every_s: float = 30.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.log = log
        self.what = what
        self.every_s = every_s
        self.now = now
        self.attempts = 0  # since all was well
        self._since = self._said = 0.0
        self._told = 0  # attempts at the last line

    def again(self, why: object) -> None:
        """It went wrong, for the first time or again."""
        now = self.now()
        self.attempts += 1
        if self.attempts == 1:
            self._since = now
            self.log.warning("%s: %s; trying again", self.what, why)
        elif now - self._said >= self.every_s:
            self.log.warning(
                "%s: %s; still trying, %d more times, for %.0f s now",
                self.what,
                why,
                self.attempts - self._told,
                now - self._since,
            )
        else:
            return
        self._said, self._told = now, self.attempts

    def over(self) -> None:
        """It went well; says so when it did not before."""
        if self.attempts:
            self.log.info("%s: all is well again after %d failed attempts", self.what, self.attempts)
        self.attempts = self._told = 0
