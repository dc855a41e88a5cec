"""`mainspring tenants`: who may use the pool, and with which share."""

from __future__ import annotations

from typing import Annotated

import typer

from mainspring_ops.terminal import DEFAULT_URL, CommandFailed, Pool, Url, console, new_table, open_view

app = typer.Typer(help="Add tenants to the pool, and list them.", no_args_is_help=True)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="1 to 100 letters, digits, '_', '.' or '-'.")],
    weight: Annotated[float, typer.Option(min=0.001, max=1e6, help="Share of the pool relative to the others.")] = 1.0,
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
) -> None:
    """Let a tenant in, or change its weight.

    When the pool is busy, a tenant of weight 2 gets twice the tokens of one of weight 1. A pool that is not busy serves
    everybody at once, whatever the weights.
    """
    from mainspring_broker import functions, keys

    try:
        keys.check_name("tenant", name)
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    with open_view(url, pool) as view:
        added = functions.run(view.client, functions.add_tenant(pool=pool, tenant=name, weight=weight))
    console().print(f"tenant {name} {'added to' if added else 'was already in'} pool {pool}, weight {weight:g}")


@app.command("ls")
def list_tenants(url: Url = DEFAULT_URL, pool: Pool = "main") -> None:
    """List the tenants with their weights and how many open jobs each has."""
    with open_view(url, pool) as view:
        rows = view.tenants()
    table = new_table("tenant", "weight", "open jobs", numbers=("weight", "open jobs"))
    for tenant in rows:
        table.add_row(tenant.name, f"{tenant.weight:g}", str(tenant.jobs))
    console().print(table)
