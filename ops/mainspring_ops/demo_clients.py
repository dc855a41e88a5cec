"""The four clients of the demo: the same training, four shapes of loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mainspring as trio

RANK = 8
LEARNING_RATE = 5e-3
SEQUENCE = 128  # tokens
SEQUENCES = 8  # per update
CHARACTERS = 60_000  # of each text
HELD_OUT_EVERY = 8  # every eighth sequence is kept for the evaluation

Batch = list[trio.Datum]
Update = tuple[trio.APIFuture[Any], trio.APIFuture[Any]]


@dataclass
class Trainee:
    """One client with its data, and what it has seen so far."""

    topic: str
    style: str
    client: trio.TrainingClient
    batches: Callable[[int], Batch]  # the batch of an update
    held_out: Batch
    spans: list[int] = field(default_factory=list)  # cycles of each update
    cycles: list[int] = field(default_factory=list)  # the cycle in which each update ended

    def finished(self, first: trio.APIFuture[Any], last: trio.APIFuture[Any]) -> None:
        if first.cycle is not None and last.cycle is not None:
            self.spans.append(last.cycle - first.cycle + 1)
            self.cycles.append(last.cycle)

    async def held_out_loss(self, client: trio.TrainingClient) -> tuple[float, list[float]]:
        """Mean loss (nats per token) and all log-probabilities of the held-out text under `client`'s adapter."""
        result = await (await client.forward_async(self.held_out, "cross_entropy"))
        logprobs = [value for row in result.loss_fn_outputs for value in row["logprobs"].tolist()]
        return result.metrics["loss_mean"], logprobs


async def naive(trainee: Trainee, updates: int, adam: trio.AdamParams, step: Callable[[], None]) -> None:
    """Submit one request, await it, submit the next."""
    for number in range(updates):
        trained = await trainee.client.forward_backward_async(trainee.batches(number), "cross_entropy")
        await trained
        stepped = await trainee.client.optim_step_async(adam)
        await stepped
        trainee.finished(trained, stepped)
        step()


async def pair(trainee: Trainee, updates: int, adam: trio.AdamParams, step: Callable[[], None]) -> None:
    """Submit both requests of an update, then await them."""
    for number in range(updates):
        trained, stepped = await _submit(trainee.client, trainee.batches(number), adam)
        await trained
        await stepped
        trainee.finished(trained, stepped)
        step()


async def pipeline(trainee: Trainee, updates: int, adam: trio.AdamParams, step: Callable[[], None]) -> None:
    """Submit the next update before the current one is awaited."""
    waiting: deque[Update] = deque()
    for number in range(updates):
        waiting.append(await _submit(trainee.client, trainee.batches(number), adam))
        if len(waiting) > 1:
            await _finish(trainee, waiting.popleft(), step)
    while waiting:
        await _finish(trainee, waiting.popleft(), step)


async def accumulate(trainee: Trainee, updates: int, adam: trio.AdamParams, step: Callable[[], None]) -> None:
    """Submit each update's batch in several pieces: their gradients add up until the optim_step."""
    for number in range(updates):
        batch = trainee.batches(number)
        pieces = [batch[i : i + 2] for i in range(0, len(batch), 2)]
        trained = [await trainee.client.forward_backward_async(piece, "cross_entropy") for piece in pieces]
        stepped = await trainee.client.optim_step_async(adam)
        await stepped
        trainee.finished(trained[0], stepped)
        step()


Loop = Callable[[Trainee, int, trio.AdamParams, Callable[[], None]], Awaitable[None]]

# Each loop, and its cycles from update to update on a busy pool: what it makes of the same number of cycles.
STYLES: dict[str, tuple[Loop, int]] = {
    "naive": (naive, 4),
    "pair": (pair, 2),
    "pipeline": (pipeline, 1),
    "accumulate": (accumulate, 2),
}


async def _submit(client: trio.TrainingClient, batch: Batch, adam: trio.AdamParams) -> Update:
    trained = await client.forward_backward_async(batch, "cross_entropy")
    return trained, await client.optim_step_async(adam)


async def _finish(trainee: Trainee, update: Update, step: Callable[[], None]) -> None:
    for future in update:
        await future
    trainee.finished(*update)
    step()


def split(ids: Sequence[int]) -> tuple[Callable[[int], Batch], Batch]:
    """A text's batches by number (the text again and again), and the sequences that are held out."""
    rows = [ids[start : start + SEQUENCE + 1] for start in range(0, len(ids) - SEQUENCE - 1, SEQUENCE)]
    data = [
        trio.Datum(model_input=trio.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})
        for row in rows
    ]
    held_out = data[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [datum for index, datum in enumerate(data) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]

    def batch(number: int) -> Batch:
        return [train[(number * SEQUENCES + i) % len(train)] for i in range(SEQUENCES)]

    return batch, held_out
