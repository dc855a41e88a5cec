"""Log lines as text and as JSON, and trouble that is summed up instead of repeated."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from mainspring_broker.logs import JsonFormatter, TextFormatter, Trouble, fields, hide_password


def record(message: str, *args: object, error: Exception | None = None, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("mainspring.worker", logging.WARNING, "f.py", 1, message, args, None)
    made.__dict__.update(fields(**values) if values else {})
    if error is not None:
        try:
            raise error
        except Exception:
            made.exc_info = sys.exc_info()
    return made


def test_text_shows_the_message_and_then_the_values() -> None:
    line = TextFormatter().format(record("batch %s", "committed", cycle=7, ms=1.5, why='a "bad" thing', empty=""))
    assert line[2] == line[5] == ":"
    assert line[9:] == 'WARNING batch committed cycle=7 ms=1.5 why="a \\"bad\\" thing" empty=""'


def test_json_is_one_object_a_line_with_the_values_as_fields() -> None:
    line = JsonFormatter().format(record("request failed: %s", "two\nlines", job="acme/ü", seq=3))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["time"].endswith("+00:00")
    del entry["time"]
    assert entry == {
        "level": "WARNING",
        "logger": "mainspring.worker",
        "message": "request failed: two\nlines",
        "job": "acme/ü",
        "seq": 3,
    }


def test_a_traceback_is_in_both() -> None:
    assert "ValueError: broken" in TextFormatter().format(record("x", error=ValueError("broken")))
    line = JsonFormatter().format(record("x", error=ValueError("broken")))
    assert "\n" not in line
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_a_value_cannot_take_the_place_of_what_every_line_has() -> None:
    with pytest.raises(ValueError, match="message"):
        fields(message="x")


def test_a_url_is_logged_without_its_password() -> None:
    assert hide_password("redis://me:pw@host:1/0") == "redis://me:***@host:1/0"


# -- trouble ----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[logging.Logger]:
    with caplog.at_level(logging.INFO, "trouble"):
        yield logging.getLogger("trouble")


def test_an_hour_of_trouble_is_a_line_every_half_minute(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trouble = Trouble(log, "Redis", every_s=30, now=clock)
    for _ in range(3600):
        trouble.again("refused")
        clock.now += 1
    trouble.over()
    lines = [line.getMessage() for line in caplog.records]
    assert lines[0] == "Redis: refused; trying again"
    assert lines[1] == "Redis: refused; still trying, 30 more times, for 30 s now"
    assert lines[-1] == "Redis: all is well again after 3600 failed attempts"
    assert len(lines) == 1 + 119 + 1


def test_each_new_trouble_is_said_at_once_and_good_times_say_nothing(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble(log, "Redis", now=Clock())
    trouble.over()
    assert caplog.records == []
    for _ in range(2):
        trouble.again("refused")
        trouble.over()
        trouble.over()
    assert len(caplog.records) == 4
