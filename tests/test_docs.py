"""The documentation is true: tables are those of the code, and each block of code runs against a real service.

How a page says what is to happen with a block: `<!-- not run: why -->` before it skips it (installations, and what runs until
Ctrl-C); `<!-- output -->` before a text block compares it with what the python block before has printed, numbers aside.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

import mainspring as trio
from mainspring_broker import errors, keys
from mainspring_broker.wire import Init, OptimStep, encode_operation
from tests import redis_cli
from tests.doc_tables import TABLES, error_rows, markdown, replace_table, table
from tests.helpers import Scene
from tests.up import started, up

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"(pip|git|cp|docker|make|export|pytest|python scripts/|mainspring (up|clock|worker|demo|end))\b")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


# -- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block and the comment before it."""

    language: str
    code: str
    comment: str  # "not run: …", "output", or ""
    line: int


def blocks(page: Path) -> list[Block]:
    source = page.read_text("utf-8")
    pattern = re.compile(r"(?:^<!-- (?P<comment>.*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
    return [
        Block(found["language"], found["code"], found["comment"] or "", source[: found.start()].count("\n") + 1)
        for found in pattern.finditer(source)
    ]


def loose(output: str) -> list[str]:
    """What must be the same in two runs: words, not numbers, ids or folders."""
    output = re.sub(r"\d{8}-\d{6}-[0-9a-f]{8}", "JOB", output)
    output = re.sub(r"\S*/(?=adapters/)", "", output)
    output = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", output)
    return [" ".join(line.split()) for line in output.strip().splitlines()]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one `mainspring up` for all pages, also in the environment."""
    folder = tmp_path_factory.mktemp("docs")
    with up(folder) as process, pytest.MonkeyPatch.context() as environment:
        with started(folder, process) as client:
            assert client.ping()
        url = next(line for line in (folder / "out").read_text().splitlines() if line.startswith("export "))
        environment.setenv("MAINSPRING_URL", url.partition("=")[2])
        environment.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield url.partition("=")[2]
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.timeout(300)
@pages
def test_every_block_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = blocks(page)
    if any(not block.comment and block.language in ("python", "console", "bash") for block in found):
        request.getfixturevalue("service")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    with asyncio.Runner() as runner, ExitStack() as at_the_end:
        at_the_end.callback(close_clients, namespace)
        for block in found:
            where = f"{page.name}:{block.line}"
            if block.comment.startswith("not run: "):
                assert all(NOT_RUN.match(line) for line in block.code.splitlines() if line), where
            elif block.language == "python":
                printed = run_python(block.code, where, namespace, runner)
            elif block.language == "console" and block.code.startswith("$ redis-cli "):
                run_redis_cli(block, where, os.environ["MAINSPRING_URL"])
            elif block.language in ("console", "bash"):
                run_shell(block, where, tmp_path)
            elif block.comment == "output":
                assert loose(printed) == loose(block.code), f"{where}: this was printed:\n{printed}"


def close_clients(namespace: dict[str, Any]) -> None:
    """A client that a page leaves open would go on in its thread through the tests that follow."""
    for value in namespace.values():
        if isinstance(value, trio.ServiceClient):
            value.close()


def run_python(code: str, where: str, namespace: dict[str, Any], runner: asyncio.Runner) -> str:
    compiled = compile(code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    out = io.StringIO()
    with redirect_stdout(out):
        if compiled.co_flags & inspect.CO_COROUTINE:
            runner.run(eval(compiled, namespace))
        else:
            exec(compiled, namespace)
    return out.getvalue()


def run_shell(block: Block, where: str, folder: Path) -> None:
    lines = block.code.splitlines()
    commands = [line[2:] for line in lines if line.startswith("$ ")] if block.language == "console" else lines
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{where}: {done.stderr[-2000:]}"


def run_redis_cli(block: Block, where: str, url: str) -> None:
    """Each command of the block answers as the page shows it, numbers and digests aside."""
    with redis.Redis.from_url(url, protocol=2) as client:
        for call in block.code.split("$ redis-cli ")[1:]:
            command, _, shown = call.partition("\n")
            answer = redis_cli.run(client, shlex.split(command))
            plain = [loose(re.sub(r"\b[0-9a-f]{8,}\b", "0", text)) for text in (answer, shown)]
            assert plain[0] == plain[1], f"{where}: {command} gave:\n{answer}"


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_that_of_the_code(name: str) -> None:
    assert replace_table(text(name), table(name)) == text(name), "run `make docs`"


def test_the_error_table_is_complete() -> None:
    listed = {row[0]: row[1] for row in error_rows()}
    for code, cls in errors.BY_CODE.items():
        if cls is errors.MainspringError:
            continue
        assert cls.__name__ in listed, f"{cls.__name__} is missing in the tree at the top of errors.py"
        assert listed[cls.__name__] in (code, ""), cls


def test_every_command_is_in_cli_md() -> None:
    import typer

    from mainspring_ops.cli import app

    command = typer.main.get_command(app)
    page = text("cli.md")
    for name, sub in command.commands.items():  # type: ignore[attr-defined]
        assert f"## mainspring {name}\n" in page, name
        for inner in getattr(sub, "commands", {}):
            assert f"mainspring {name} {inner}" in page
    for option in command.commands["up"].params:  # type: ignore[attr-defined]
        assert f"`{option.opts[0]}`" in page, option.opts


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES[2:]], ids=lambda page: page.name)
def test_every_page_ends_with_its_sharp_edges(page: Path) -> None:
    assert re.findall(r"^## (.*)$", page.read_text("utf-8"), re.M)[-1] == "Sharp edges"


# -- the life of a request --------------------------------------------------------------------------------------------

STEPS = [
    ("the job is open, its `init` (seq 1) is done", ""),
    ("`forward_backward(batch)` is encoded", "sdk/mainspring/encoding.py"),
    ("it is accepted as seq 2", "broker/mainspring_broker/lua/submit.lua"),
    ("`optim_step(…)` is accepted as seq 3", "broker/mainspring_broker/lua/submit.lua"),
    ("the idle clock wakes and gathers", "clock/mainspring_clock/daemon.py"),
    ("the boundary: both are in cycle 2", "broker/mainspring_broker/lua/tick.lua"),
    ("the worker fetches batch and payloads", "workers/mainspring_workers/loop.py"),
    ("it computes and steps", "workers/mainspring_workers/engine.py"),
    ("it commits", "broker/mainspring_broker/lua/commit.lua"),
    ("the futures resolve", "sdk/mainspring/results.py"),
]
COLUMNS = [
    "step",
    "done by",
    "`job:j1`: last, taken, done",
    "`requests`",
    "`queue`",
    "`ready:w1`",
    "`wake`",
    "`pending`",
    "`result:…`",
]


def state(scene: Scene) -> list[str]:
    """The columns of keys, as they are now."""
    r, pool, job = scene.r, scene.pool, keys.job(scene.pool, "ada", "j1")
    seqs = [value.decode() for value in r.hmget(job, "last_seq", "taken_seq", "done_seq")]
    requests = [entry.decode() for entry, _ in r.xrange(f"{job}:requests")]
    queue = [header.decode() for header in r.lrange(f"{job}:queue", 0, -1)]
    pending = [f"{name.decode()}: {token.decode()[:4]}…" for name, token in r.hgetall(keys.pending(pool)).items()]
    results = sorted(key.decode().rpartition(":")[2] for key in r.scan_iter(f"{job}:result:*"))
    results.remove("1")
    cells = [
        " ".join(seqs),
        ", ".join(requests),
        ", ".join(queue),
        ", ".join(scene.ready("ada", "w1")),
        "1" if r.llen(keys.wake(pool, "ada")) else "",
        ", ".join(pending),
        ", ".join(results),
    ]
    return [f"`{cell}`" if cell else "" for cell in cells]


def test_the_life_of_a_request_is_what_happens(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job("j1", "ada").submit("init", payload=encode_operation(Init(rank=8, seed=1)))
    scene.tick(batch_seed="cycle 1")
    scene.commit()
    scene.r.delete(keys.wake(scene.pool, "ada"))

    states = [state(scene)] * 2  # encoding writes nothing
    job.submit(("forward_backward", 21))
    states.append(state(scene))
    job.submit("optim_step", payload=encode_operation(OptimStep()))
    states.append(state(scene))
    assert scene.r.blpop([keys.wake(scene.pool, "ada")], timeout=1) is not None
    states.append(state(scene))
    scene.tick(batch_seed="cycle 2")
    states += [state(scene)] * 3  # fetching and computing write nothing
    scene.commit()
    states += [state(scene)] * 2

    rows = [
        [str(number), what, f"[{Path(file).name}](../{file})" if file else "", *cells]
        for number, ((what, file), cells) in enumerate(zip(STEPS, states, strict=True))
    ]
    expected = markdown("| | " + " | ".join(COLUMNS) + " |", rows, ())
    page = text("life-of-a-request.md")
    assert replace_table(page, expected) == page, f"docs/life-of-a-request.md must hold this table:\n\n{expected}\n"
    for _, file in STEPS:
        assert (ROOT / file).exists(), file
