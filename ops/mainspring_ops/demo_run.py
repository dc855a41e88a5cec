"""The course of the demo: start the service, train four clients together, evaluate, show, check against PEFT."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import statistics
import sys
import warnings
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import mainspring as trio
from mainspring_ops.cycles import timeline
from mainspring_ops.demo_clients import CHARACTERS, LEARNING_RATE, RANK, STYLES, Trainee, split
from mainspring_ops.terminal import CommandFailed, connect, console, new_table
from mainspring_ops.topics import topics
from mainspring_ops.view import View

BASE_MODEL = "mainspring-tiny"
TIMELINE_CYCLES = 14
PEFT_TOLERANCE = 1e-3  # nats; the two differ by rounding only


async def run_demo(folder: Path, cycles: int) -> int:
    """Run the demo. Returns the exit status: 1 when an exported adapter does not give the same log-probabilities."""
    out = console()
    shutil.rmtree(folder, ignore_errors=True)
    with out.status("starting Valkey, a clock and a worker"):
        service = await _Service.start(folder)
    try:
        async with contextlib.AsyncExitStack() as stack:
            trainees = [trainee async for trainee in _enter(stack, service.url)]
            before = [(await t.held_out_loss(t.client))[0] for t in trainees]
            middle = await _train(out, service.url, trainees, cycles)
            after = [[await t.held_out_loss(other.client) for other in trainees] for t in trainees]
            saved = [await (await t.client.save_weights_for_sampler_async("demo")) for t in trainees]
        _show_losses(out, trainees, before, [[loss for loss, _ in row] for row in after])
        out.print()
        out.print(middle)
        folders = [Path(s.location) for s in saved]
        own = [logprobs for t, (_, logprobs) in zip(trainees, (after[i][i] for i in range(len(after))), strict=True)]
        return _check_with_peft(out, trainees, folders, own)
    finally:
        await service.stop()


async def _enter(stack: contextlib.AsyncExitStack, url: str) -> AsyncIterator[Trainee]:
    """Four users: each its own connection, job and text."""
    for (topic, text), style in zip(topics().items(), STYLES, strict=True):
        user = await stack.enter_async_context(trio.ServiceClient(url))
        client = await user.create_lora_training_client_async(BASE_MODEL, rank=RANK, seed=1, job=f"{topic}-{style}")
        await stack.enter_async_context(client)
        batches, held_out = split(client.get_tokenizer().encode(text[:CHARACTERS]))
        yield Trainee(topic, style, client, batches, held_out)


async def _train(out: Console, url: str, trainees: list[Trainee], cycles: int) -> object:
    """Train all at once; returns a picture of some cycles from the middle of the run."""
    adam = trio.AdamParams(learning_rate=LEARNING_RATE)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    picture: object = ""
    with Progress(*columns, console=out) as progress:

        async def run(trainee: Trainee) -> None:
            loop, period = STYLES[trainee.style]
            updates = max(cycles // period, 1)
            bar = progress.add_task(f"{trainee.topic:<9} {trainee.style:<10}", total=updates)
            await loop(trainee, updates, adam, lambda: progress.advance(bar))

        async def watch() -> None:
            nonlocal picture
            while min(len(t.cycles) for t in trainees) < min(max(cycles // 8, 1), 6):
                await asyncio.sleep(0.05)
            with connect(url) as client:
                picture = timeline(View(client, "main").cycles(TIMELINE_CYCLES))

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(run(trainee) for trainee in trainees))
        await watcher
    return picture


def _show_losses(out: Console, trainees: list[Trainee], before: list[float], after: list[list[float]]) -> None:
    table = new_table(
        "text",
        "loop",
        "updates",
        "cycles/update",
        "from update to update",
        "before",
        *(f"under {t.topic}" for t in trainees),
        numbers={
            "updates",
            "cycles/update",
            "from update to update",
            "before",
            *(f"under {t.topic}" for t in trainees),
        },
    )
    for i, trainee in enumerate(trainees):
        periods = [second - first for first, second in pairwise(trainee.cycles)] or [0]
        table.add_row(
            trainee.topic,
            trainee.style,
            str(len(trainee.spans)),
            f"{statistics.median(trainee.spans):.0f}",
            f"{statistics.median(periods):.0f}",
            f"{before[i]:.2f}",
            *(f"[bold green]{loss:.2f}[/]" if i == j else f"{loss:.2f}" for j, loss in enumerate(after[i])),
        )
    out.print(
        "\nHeld-out loss (nats per token) of each text before training, and after it under every client's adapter:"
    )
    out.print(table)


def _check_with_peft(out: Console, trainees: list[Trainee], folders: list[Path], own: list[list[float]]) -> int:
    """Load each adapter with plain PEFT and compare its log-probabilities with the service's."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    from mainspring_broker import base_models

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    worst = 0.0
    with warnings.catch_warnings(action="ignore"), out.status("loading the adapters with plain PEFT"):
        for trainee, folder, expected in zip(trainees, folders, own, strict=True):
            base = AutoModelForCausalLM.from_pretrained(base_models.resolve(BASE_MODEL), dtype=torch.float32)
            model = PeftModel.from_pretrained(base, folder).eval()
            tokens = torch.tensor([datum.model_input.to_ints() for datum in trainee.held_out])
            targets = torch.tensor([datum.loss_fn_inputs["target_tokens"].tolist() for datum in trainee.held_out])
            with torch.no_grad():
                logprobs = model(tokens).logits.log_softmax(-1).gather(-1, targets[..., None]).flatten()
            worst = max(worst, float((logprobs - torch.tensor(expected)).abs().max()))
    out.print("\nAdapters, in PEFT's format:")
    for folder in folders:
        out.print(f"  {folder}", markup=False, soft_wrap=True)
    verdict = "the same" if worst <= PEFT_TOLERANCE else "NOT the same"
    out.print(f"PeftModel.from_pretrained gives {verdict} log-probabilities (largest difference {worst:.1e}).")
    return 0 if worst <= PEFT_TOLERANCE else 1


class _Service:
    """A `mainspring up` of its own, as a child process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    @classmethod
    async def start(cls, folder: Path) -> _Service:
        command = [sys.executable, "-m", "mainspring_ops", "up", "--dir", str(folder), "--port", "0"]
        process = await asyncio.create_subprocess_exec(
            *command, "--base-model", BASE_MODEL, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        while line := (await process.stdout.readline()).decode():
            if found := re.match(r"export MAINSPRING_URL=(\S+)", line):
                return cls(process, found[1])
        raise CommandFailed(f"the service did not start (exit status {await process.wait()}); see {folder}/logs")

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
