"""Every Redis key, in one place.

    key                                    type    holds                                             written by                  expires
    ms:{pool}:info                         hash    base model facts and limits                       register, the clock         never
    ms:{pool}:clock                        hash    cycle, state, name of the leader                  lead, tick, commit          never
    ms:{pool}:lease                        string  random token of the leading clock                 lead, tick                  lease_ms
    ms:{pool}:clocks                       zset    clock -> last sign of life (ms), leader and standbys      lead, resign                2 lease_ms
    ms:{pool}:pending                      hash    worker -> batch token, for the running cycle      tick, commit, requeue       empties itself
    ms:{pool}:cycle                        hash    the running cycle: plan, timings so far           tick, commit                at the boundary
    ms:{pool}:cycles                       stream  "<cycle>-0": one entry a finished cycle           commit, requeue             capped
    ms:{pool}:bell                         list    at most one token: "look again" for the clock     commit, register, add_tenant  taken by the clock
    ms:{pool}:tenants                      hash    tenant -> weight in the fair share                add_tenant                  never
    ms:{pool}:workers                      zset    worker -> last heartbeat (ms)                     register, heartbeat         with the worker
    ms:{pool}:worker:<w>                   hash    incarnation, state, slots, jobs, host, …          register, heartbeat, tick   with the worker
    ms:{pool}:worker:<w>:batches           stream  the batches for that worker                       tick                        capped, with the worker
    ms:{pool}:worker:<w>:fair              hash    virtual times of the tenants and their jobs       tick                        with the worker
    ms:{pool}:worker:<w>:jobs              set     "<tenant>/<job>" placed there                     tick, commit, requeue       empties itself
    ms:{pool}:t:<tenant>:jobs              set     jobs that have not ended                          create_job, commit          empties itself
    ms:{pool}:t:<tenant>:ready:<w>         zset    jobs with an eligible head, by virtual time       submit, tick, commit        empties itself
    ms:{pool}:t:<tenant>:wake              list    at most one token; the idle clock blocks on it    submit                      taken by the clock
    ms:{pool}:t:<tenant>:job:<job>         hash    state, last_seq, done_seq, chain, lineage, …      create_job, submit, …       after the end
    ms:{pool}:t:<tenant>:job:<job>:requests  stream  "<seq>-0": op, tokens, digest, chain, payload   submit, commit              trimmed at done_seq
    ms:{pool}:t:<tenant>:job:<job>:queue   list    "<seq> <op> <tokens>" not yet finished            submit, commit              empties itself
    ms:{pool}:t:<tenant>:job:<job>:outcomes  stream  "<seq>-0": outcome, lineage                     commit                      capped
    ms:{pool}:t:<tenant>:job:<job>:result:<seq>  string  msgpack envelope                            commit                      result_ttl_ms
    ms:{pool}:t:<tenant>:results           channel "<job>:<seq>" when a result is there              commit

{pool} is a hash tag: all keys of a pool share one cluster slot, so one function may touch several. Everything a
tenant's client touches lies under ms:{pool}:t:<tenant>, but for reads of info and tenants. In `ready:<w>`, `<w>` is "-" for
jobs that no worker holds yet.
"""

from __future__ import annotations

import re

UNPLACED = "-"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """`name`, if it may be part of a key.

    Raises:
        ValueError: anything but 1 to 100 letters, digits, `_`, `.`, `-`, the first a letter or digit.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{kind} {name[:120]!r}: use 1 to 100 letters, digits, '_', '.' or '-', the first a letter or digit"
        )
    return name


def prefix(pool: str) -> str:
    """What all keys of a pool begin with; no key by itself."""
    return f"ms:{{{pool}}}:"


def info(pool: str) -> str:
    return f"{prefix(pool)}info"


def clock(pool: str) -> str:
    return f"{prefix(pool)}clock"


def lease(pool: str) -> str:
    return f"{prefix(pool)}lease"


def clocks(pool: str) -> str:
    return f"{prefix(pool)}clocks"


def pending(pool: str) -> str:
    return f"{prefix(pool)}pending"


def cycle(pool: str) -> str:
    return f"{prefix(pool)}cycle"


def cycles(pool: str) -> str:
    return f"{prefix(pool)}cycles"


def bell(pool: str) -> str:
    return f"{prefix(pool)}bell"


def tenants(pool: str) -> str:
    return f"{prefix(pool)}tenants"


def workers(pool: str) -> str:
    return f"{prefix(pool)}workers"


def worker(pool: str, name: str) -> str:
    return f"{prefix(pool)}worker:{name}"


def worker_batches(pool: str, name: str) -> str:
    return f"{worker(pool, name)}:batches"


def worker_fair(pool: str, name: str) -> str:
    return f"{worker(pool, name)}:fair"


def worker_jobs(pool: str, name: str) -> str:
    return f"{worker(pool, name)}:jobs"


def tenant(pool: str, name: str) -> str:
    """What all keys of a tenant begin with; no key by itself."""
    return f"{prefix(pool)}t:{name}"


def jobs(pool: str, tenant_name: str) -> str:
    return f"{tenant(pool, tenant_name)}:jobs"


def ready(pool: str, tenant_name: str, worker_name: str = UNPLACED) -> str:
    return f"{tenant(pool, tenant_name)}:ready:{worker_name}"


def wake(pool: str, tenant_name: str) -> str:
    return f"{tenant(pool, tenant_name)}:wake"


def results_channel(pool: str, tenant_name: str) -> str:
    return f"{tenant(pool, tenant_name)}:results"


def job(pool: str, tenant_name: str, name: str) -> str:
    return f"{tenant(pool, tenant_name)}:job:{name}"


def requests(pool: str, tenant_name: str, job_name: str) -> str:
    return f"{job(pool, tenant_name, job_name)}:requests"


def queue(pool: str, tenant_name: str, job_name: str) -> str:
    return f"{job(pool, tenant_name, job_name)}:queue"


def outcomes(pool: str, tenant_name: str, job_name: str) -> str:
    return f"{job(pool, tenant_name, job_name)}:outcomes"


def result(pool: str, tenant_name: str, job_name: str, seq: int) -> str:
    return f"{job(pool, tenant_name, job_name)}:result:{seq}"
