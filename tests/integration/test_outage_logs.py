"""A server that goes away makes few log lines, however often a process tries, and is said to be back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import Server
from tests.helpers import wait_until


def test_an_outage_is_a_line_at_its_begin_and_one_at_its_end(own_server: Server, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MAINSPRING_URL": own_server.url,
        "MAINSPRING_LOG_FORMAT": "json",
        "MAINSPRING_METRICS_PORT": "0",
    }
    log = tmp_path / "log"

    def lines(text: str) -> list[str]:
        found = [json.loads(line)["message"] for line in log.read_text().splitlines()]
        return [message for message in found if text in message]

    with log.open("w") as out:
        clock = subprocess.Popen(
            [sys.executable, "-m", "mainspring_clock"], env=environment, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        wait_until(lambda: lines("leads pool"), "the clock leads")
        own_server.kill()
        wait_until(lambda: lines("trying again"), "the clock has noticed")
        own_server.restart()
        wait_until(lambda: lines("all is well again"), "the clock is back")
        assert len(lines("trying again")) == 1
        assert len(lines("steps down")) == 1
        wait_until(lambda: len(lines("leads pool")) == 2, "it leads again")
    finally:
        clock.terminate()
        assert clock.wait(30) == 0
    assert len(lines("has stopped")) == 1
