"""`mainspring doctor`: is everything as it must be, and what to do where it is not."""

from __future__ import annotations

from typing import Annotated

import typer

from mainspring_ops.terminal import DEFAULT_URL, CommandFailed, Pool, Url, console

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def doctor(
    only: Annotated[str, typer.Option(help="Only these checks, by commas: clock,workers,storage, …")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of findings.")] = False,
    load_model: Annotated[
        bool, typer.Option("--load-model", help="Also load the base model, as a worker does.")
    ] = False,
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
) -> None:
    """Check the server, the pool, the storage, the base model and this host.

    One line for each check: ok, warning (it works, but) or fault, and what to do. Exit status 1 when there is a fault.
    Run it on a worker's host as the user of the workers, so that it sees their files. It changes nothing, but for a small
    file that it writes to the storage and deletes again.
    """
    import json
    from dataclasses import asdict

    from rich.text import Text

    from mainspring_ops.checks import CHECKS, run_checks
    from mainspring_ops.facts import gather

    names = frozenset(name.strip() for name in only.split(",") if name.strip())
    if unknown := names - CHECKS.keys():
        raise CommandFailed(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    findings = run_checks(gather(url, pool, load_model=load_model), names)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        out = console()
        for finding in findings:
            line = Text(f"{finding.level:<8}", style=STYLES[finding.level])
            out.print(line.append(f"{finding.check:<13}{finding.said}", style="default"), soft_wrap=True)
            if finding.todo:
                out.print(Text(f"{'':<21}→ {finding.todo}"), soft_wrap=True)
    raise typer.Exit(int(any(finding.level == "fault" for finding in findings)))
