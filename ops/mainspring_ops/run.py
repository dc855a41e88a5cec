"""`mainspring clock` and `mainspring worker`: one process of the service in the foreground."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Option = typer.Option

# None means "not given here": then the environment decides, then the default of the settings class.
Url = Annotated[str | None, Option("--url", help="Redis or Valkey of the pool [MAINSPRING_URL]")]
Pool = Annotated[str | None, Option("--pool", help="Name of the pool [MAINSPRING_POOL]")]
LogLevel = Annotated[str | None, Option("--log-level", help="DEBUG, INFO, WARNING or ERROR [MAINSPRING_LOG_LEVEL]")]


def clock(
    url: Url = None,
    pool: Pool = None,
    tenants: Annotated[
        str | None, Option(help="Tenants let in at the start: name or name=weight, by commas [MAINSPRING_TENANTS]")
    ] = None,
    token_budget: Annotated[
        int | None, Option(help="Tokens per cycle and worker; more waits for the next [MAINSPRING_TOKEN_BUDGET]")
    ] = None,
    gather_ms: Annotated[
        float | None, Option(help="Idle pool: wait this long for more after a request [MAINSPRING_GATHER_MS]")
    ] = None,
    gather_limit_ms: Annotated[
        float | None, Option(help="Idle pool: the longest such wait [MAINSPRING_GATHER_LIMIT_MS]")
    ] = None,
    lease_ms: Annotated[
        int | None, Option(help="A standby takes over after this much silence [MAINSPRING_LEASE_MS]")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Run a clock: it closes one cycle after another for one pool.

    A pool needs one clock. A second one stands by and takes over within the lease when the first is gone. The clock
    loads the Lua function library into Redis. It needs no GPU and hardly any memory; all of its state is in Redis, so
    it may be killed at any moment. Stop it with Ctrl-C or SIGTERM.

    The other settings are environment variables: docs/settings.md.
    """
    from mainspring_clock.main import run_clock
    from mainspring_clock.settings import ClockSettings

    given = _given(
        url=url,
        pool=pool,
        tenants=tenants,
        token_budget=token_budget,
        gather_ms=gather_ms,
        gather_limit_ms=gather_limit_ms,
        lease_ms=lease_ms,
        log_level=log_level,
    )
    raise typer.Exit(run_clock(ClockSettings(**given)))


def worker(
    url: Url = None,
    pool: Pool = None,
    name: Annotated[
        str | None, Option(help="Its name; a restart under the same name takes its work back [MAINSPRING_WORKER]")
    ] = None,
    base_model: Annotated[
        str | None, Option(help="A shipped name, a folder, or a Hugging Face id [MAINSPRING_BASE_MODEL]")
    ] = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1 [MAINSPRING_DEVICE]")] = None,
    dtype: Annotated[str | None, Option(help="Of the frozen base: float32 or bfloat16 [MAINSPRING_DTYPE]")] = None,
    storage: Annotated[
        str | None, Option(help="Where checkpoints go: a folder, or a URL for fsspec [MAINSPRING_STORAGE]")
    ] = None,
    slots: Annotated[int | None, Option(help="Jobs it holds at most [MAINSPRING_SLOTS]")] = None,
    threads: Annotated[int | None, Option(help="CPU threads; 0: one a core [MAINSPRING_THREADS]")] = None,
    micro_batch_tokens: Annotated[
        int | None, Option(help="Tokens through the model at a time: bounds memory [MAINSPRING_MICRO_BATCH_TOKENS]")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Run a worker: it holds the base model and many jobs' adapters, and computes their part of each cycle.

    Start as many as there are devices, on any host that reaches Redis and the storage folder; the clock places jobs on
    them. All workers of a pool have the same base model. Stop it with Ctrl-C or SIGTERM: it finishes its batch first.
    What its open jobs have not saved is lost with it.

    The other settings are environment variables: docs/settings.md.
    """
    from mainspring_workers.main import run_worker
    from mainspring_workers.settings import WorkerSettings

    given = _given(
        url=url,
        pool=pool,
        worker=name,
        base_model=base_model,
        device=device,
        dtype=dtype,
        storage=storage,
        slots=slots,
        threads=threads,
        micro_batch_tokens=micro_batch_tokens,
        log_level=log_level,
    )
    raise typer.Exit(run_worker(WorkerSettings(**given)))


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
