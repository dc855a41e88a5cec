"""`mainspring end`: end jobs that nobody will end any more."""

from __future__ import annotations

from typing import Annotated

import typer

from mainspring_ops.terminal import DEFAULT_URL, CommandFailed, Pool, Url, console, open_view


def end(
    jobs: Annotated[list[str], typer.Argument(help="Jobs as `mainspring jobs` shows them: tenant/job, or job.")],
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
) -> None:
    """End jobs and free their slots, after everything that they have queued.

    For jobs whose client is gone without ending them. A client that still lives finds its job ended.
    """
    from mainspring_broker import functions, keys
    from mainspring_broker.wire import End, encode_operation

    payload = encode_operation(End())
    with open_view(url, pool) as view:
        for name in jobs:
            tenant, _, job = name.rpartition("/")
            tenant = tenant or "default"
            fields = view.client.hmget(keys.job(pool, tenant, job), "writer", "last_seq", "chain")
            if fields[0] is None:
                raise CommandFailed(f"there is no job {tenant}/{job} in pool {pool}; see `mainspring jobs`")
            call = functions.submit(
                pool=pool,
                tenant=tenant,
                job=job,
                writer=functions.text(fields[0]),
                seq=int(fields[1]) + 1,
                chain=functions.text(fields[2]),
                op="end",
                tokens=0,
                digest=functions.request_digest("end", payload),
                payload=payload,
            )
            functions.run(view.client, call)
            console().print(f"{tenant}/{job} ends after what it has queued")
