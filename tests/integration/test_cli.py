"""The `mainspring` command as people run it: what it shows of a pool, and what it says when something is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mainspring_broker import keys
from mainspring_broker.wire import Envelope, ForwardBackward, Jagged, OptimStep, encode_envelope, encode_operation
from mainspring_ops import cli
from mainspring_ops.cycles import short
from mainspring_ops.inspect_key import show
from mainspring_ops.terminal import ago, count, hide_password
from tests.conftest import Server
from tests.helpers import Scene, wait_until
from tests.up import START_S, command, processes_of, started, up

COMMANDS = [
    "up",
    "demo",
    "clock",
    "worker",
    "jobs",
    "end",
    "cycles",
    "inspect",
    "workers",
    "top",
    "tenants",
    "tenants add",
    "tenants ls",
    "doctor",
    "health",
    "health clock",
    "health worker",
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; gives exit status, output, error output."""
    for name in list(os.environ):
        if name.startswith("MAINSPRING_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mainspring", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def shown(run: Run, server: Server, pool: str) -> Callable[..., str]:
    """Run a command on the test's pool that must succeed; gives its output."""

    def call(*words: str) -> str:
        status, out, err = run(*words, "--url", server.url, "--pool", pool)
        assert status == 0, err
        return out

    return call


def payload() -> bytes:
    tokens = Jagged(np.arange(10, dtype=np.int32), np.array([4, 6], dtype=np.int32))
    weights = Jagged(np.ones(10, dtype=np.float32), np.array([4, 6], dtype=np.int32))
    return encode_operation(ForwardBackward("cross_entropy", tokens, {"weights": weights}))


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    status, out, _ = run(*command.split(), "--help")
    assert status == 0
    assert f"mainspring {command}" in out


def test_the_list_of_commands_here_is_complete(run: Run) -> None:
    _, out, _ = run("--help")
    for name in COMMANDS:
        assert name.split()[0] in out


def test_help_and_light_commands_load_no_torch_and_no_redis() -> None:
    code = "import sys, mainspring_ops.cli; print([m for m in ('torch', 'redis', 'numpy', 'rich.table') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["jobs", "cycles", "workers", "top", "tenants ls", "inspect clock"])
def test_a_missing_server_is_said_in_words(run: Run, command: str) -> None:
    status, _, err = run(*command.split(), "--url", "redis://user:secret@127.0.0.1:1/0")
    assert status == 1
    assert "no Redis at redis://user:***@127.0.0.1:1/0" in err
    assert "mainspring up" in err
    assert "Traceback" not in err
    assert "secret" not in err


def test_a_missing_pool_is_said_in_words(run: Run, server: Server) -> None:
    status, _, err = run("jobs", "--url", server.url, "--pool", "nowhere")
    assert status == 1
    assert "no pool 'nowhere'" in err


def test_a_url_that_is_none_is_said_in_words(run: Run) -> None:
    status, _, err = run("jobs", "--url", "localhost:6379")
    assert status == 1
    assert "not a Redis URL" in err


def test_a_wrong_setting_is_named(run: Run) -> None:
    status, _, err = run("clock", "--token-budget", "0")
    assert status == 1
    assert "MAINSPRING_TOKEN_BUDGET" in err
    assert "0" in err


def test_the_url_comes_from_the_environment(
    run: Run, scene: Scene, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.register()
    monkeypatch.setenv("MAINSPRING_URL", server.url)
    monkeypatch.setenv("MAINSPRING_POOL", scene.pool)
    assert run("workers")[0] == 0


# -- views ------------------------------------------------------------------------------------------------------------


def test_jobs_shows_how_far_each_job_is(scene: Scene, shown: Callable[..., str]) -> None:
    scene.register()
    assert "no open jobs" in shown("jobs")
    job = scene.job("first", "acme").submit("init").update()
    scene.job("second", "other").submit("init")
    scene.tick()
    scene.commit(failed=[("first", 2)])
    job.update()
    row = next(line for line in shown("jobs").splitlines() if "first" in line)
    assert row.split()[:10] == ["acme", "first", "open", "tiny", "8", "w1", "2", "3", "1", "1"]
    assert row.rstrip().endswith("ago")
    assert "second" in shown("jobs")
    assert "second" not in shown("jobs", "acme")


def test_end_ends_a_job_that_its_client_has_left(scene: Scene, shown: Callable[..., str], run: Run) -> None:
    scene.register()
    job = scene.job("left", "acme").submit("init")
    assert "acme/left ends" in shown("end", "acme/left")
    scene.tick()
    scene.commit()
    assert job.field("state") == "ended"


def test_cycles_shows_operations_by_job_and_cycle(scene: Scene, shown: Callable[..., str]) -> None:
    scene.register()
    assert "has not run any cycle" in shown("cycles")
    a = scene.job("a", "acme").submit("init", ("forward_backward", 10), ("forward_backward", 20), "optim_step")
    scene.tick()
    scene.commit()
    a.submit("save_weights")
    scene.job("b", "acme").submit("init")
    scene.tick()
    scene.commit()
    lines = shown("cycles").splitlines()
    assert next(line.split() for line in lines if line.startswith("acme/a")) == ["acme/a", "I·FB×2·O", "S"]
    assert next(line.split() for line in lines if line.startswith("acme/b")) == ["acme/b", "I"]
    assert next(line.split() for line in lines if line.startswith("tokens")) == ["tokens", "30", "0"]
    assert "I·FB" not in shown("cycles", "--last", "1")


def test_workers_shows_the_leader_and_the_heartbeat(scene: Scene, shown: Callable[..., str]) -> None:
    scene.register("w1", device="cpu")
    assert "none: start one" in shown("workers")
    scene.lead(name="the-clock")
    out = shown("workers")
    assert "clock the-clock" in out
    row = next(line for line in out.splitlines() if "w1" in line)
    assert "ready" in row
    assert "0/8" in row
    assert "device cpu" in row


def test_tenants_are_added_weighed_and_listed(scene: Scene, run: Run, shown: Callable[..., str]) -> None:
    scene.register()
    assert "added to" in shown("tenants", "add", "acme")
    assert "already in" in shown("tenants", "add", "acme", "--weight", "2.5")
    assert scene.r.hget(keys.tenants(scene.pool), "acme") == b"2.5"
    row = next(line for line in shown("tenants", "ls").splitlines() if "acme" in line)
    assert row.split() == ["acme", "2.5", "0"]
    status, _, err = run("tenants", "add", "no spaces")
    assert status == 1
    assert "letters, digits" in err


def test_inspect_decodes_every_kind_of_key(scene: Scene, shown: Callable[..., str], run: Run, server: Server) -> None:
    scene.register()
    job = scene.job("j1", "acme").submit("init")
    job.submit(("forward_backward", 10), payload=payload())
    job.submit("optim_step", payload=encode_operation(OptimStep(learning_rate=0.5)))

    stream = shown("inspect", "t:acme:job:j1:requests")
    assert "op=forward_backward" in stream
    assert f"payload={len(payload())} bytes" in stream
    entry = shown("inspect", "t:acme:job:j1:requests", "2")
    assert "loss_fn: cross_entropy" in entry
    assert "values: int32 [10] 0 1 2 3 4 5 …" in entry
    assert "values: float32 [10] 1 1 1 1 1 1 …" in entry
    assert "learning_rate: 0.5" in shown("inspect", keys.requests(scene.pool, "acme", "j1"), "3")
    assert "cannot be decoded" in shown("inspect", "t:acme:job:j1:requests", "1")
    assert "2 forward_backward 10" in shown("inspect", "t:acme:job:j1:queue")
    assert "state: open" in shown("inspect", "t:acme:job:j1")

    scene.tick()
    batches = shown("inspect", "worker:w1:batches")
    assert "tenant: acme" in batches
    assert "acme/j1" in shown("inspect", "worker:w1:jobs")
    assert "w1" in shown("inspect", "workers")
    envelope = Envelope({"loss": np.float32(1.5)}, None, 1, 0.5, 2.5, "w1")
    batch = scene.batch()
    assert batch is not None
    scene.commit(executed=scene.executed(batch, result=encode_envelope(envelope)))
    result = shown("inspect", "t:acme:job:j1:result:2")
    assert "loss: 1.5" in result
    assert "compute_ms: 2.5" in result
    assert "(empty)" in shown("inspect", "t:acme:job:j1:requests")  # trimmed, all is done
    status, _, err = run("inspect", "t:acme:job:j2", "--url", server.url, "--pool", scene.pool)
    assert status == 1
    assert "there is no key" in err


# -- small words ------------------------------------------------------------------------------------------------------


def test_operations_in_a_few_letters() -> None:
    assert short(["forward_backward", "optim_step"]) == "FB·O"
    assert short(["init", "forward", "forward"]) == "I·F×2"
    assert short(["from_the_future"]) == "from_the_future"


def test_spans_counts_and_urls() -> None:
    assert [ago(ms) for ms in (5, 1500, 90_000, 7_200_000, 2e8)] == ["5 ms", "2 s", "2 min", "2 h", "2 d"]
    assert [count(n) for n in (0, 9400, 12_345, 123_456, 4_100_000)] == ["0", "9400", "12.3k", "123k", "4.1M"]
    assert hide_password("redis://me:pw@host:1/0") == "redis://me:***@host:1/0"
    assert hide_password("unix:///tmp/s") == "unix:///tmp/s"


def test_long_values_are_cut() -> None:
    lines = show({"text": "x" * 1000, "rows": [{"a": 1}] * 50})
    assert "1000 characters" in lines[0]
    assert lines[-1].strip() == "… 30 more"


# -- up ---------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_up_restarts_what_crashes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with up(tmp_path) as process:
        with started(tmp_path, process) as client:
            assert len(processes_of(tmp_path)) == 4  # up, valkey, clock, worker
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
            assert client.config_get("appendonly")["appendonly"] == "yes"
            worker = keys.worker("main", "worker-1")
            first = client.hget(worker, "incarnation")
            os.kill(int(client.hget(worker, "pid")), signal.SIGKILL)
            wait_until(lambda: client.hget(worker, "incarnation") != first, "the worker is back", timeout=START_S)
            assert "worker-1 ended (SIGKILL), starting it again" in (tmp_path / "out").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert processes_of(tmp_path) == []
        assert {path.name for path in (tmp_path / "data" / "logs").iterdir()} == {
            "valkey.log",
            "clock.log",
            "worker-1.log",
        }


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.timeout(300)
def test_children_end_with_an_up_that_is_killed_and_its_data_stays(tmp_path: Path) -> None:
    with up(tmp_path) as process:
        with started(tmp_path, process) as client:
            client.hset(keys.tenants("main"), "kept", "3")
        process.kill()
        process.wait(30)
        wait_until(lambda: not processes_of(tmp_path), "all children have ended", timeout=30)
    with up(tmp_path, "--verbose") as process:
        with started(tmp_path, process) as client:
            assert client.hget(keys.tenants("main"), "kept") == b"3"
        second = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        assert second.returncode == 1
        assert "another `mainspring up` runs in" in second.stderr
        process.terminate()
        assert process.wait(60) == 0
        assert "worker-1 │ " in (tmp_path / "out").read_text()
    assert processes_of(tmp_path) == []


@pytest.mark.timeout(200)
def test_up_says_why_a_process_did_not_start(tmp_path: Path) -> None:
    with up(tmp_path, "--base-model", str(tmp_path / "no-such-model")) as process:
        assert process.wait(120) == 1
        said = (tmp_path / "out").read_text()
        assert "worker-1 did not start" in said
        assert "no-such-model" in said
    assert processes_of(tmp_path) == []
