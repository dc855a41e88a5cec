"""Through the whole service: jobs with different losses side by side, and a loss that runs in the client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mainspring as trio
from tests.integration.training import TOLERANCE, VOCAB, Recipe, adam, oracle_of, step_of, weights
from tests.service import Service
from tests.tiny import Datum, random_episodes

UPDATES = 10


@dataclass(frozen=True)
class LossRecipe(Recipe):
    loss_fn: str = "cross_entropy"
    config: Mapping[str, float] = field(default_factory=dict)

    def datums(self, update: int) -> list[Datum]:
        return random_episodes(1000 * self.seed + update, self.lengths, VOCAB)


RECIPES = [
    LossRecipe("is", 8, 1, (17, 9), adam(), loss_fn="importance_sampling"),
    LossRecipe("ppo", 8, 2, (17, 9), adam(), loss_fn="ppo"),
    LossRecipe(
        "wide", 4, 3, (12,), adam(), loss_fn="ppo", config={"clip_low_threshold": 0.1, "clip_high_threshold": 5}
    ),
    LossRecipe("cispo", 16, 4, (8, 8, 8), adam(), {"train_unembed": False}, loss_fn="cispo"),
    LossRecipe("dro", 8, 5, (20,), adam(), loss_fn="dro"),
    LossRecipe("strong", 2, 6, (6, 5), adam(), loss_fn="dro", config={"beta": 0.4}),
]
PAIRS = Recipe("pairs", 8, 7, (7, 9, 5, 6, 8, 8, 3, 4), adam())


def to_sdk(datums: Sequence[Datum], *, weights: bool = True) -> list[trio.Datum]:
    return [
        trio.Datum(
            trio.ModelInput.from_ints(d.tokens),
            {"target_tokens": d.targets, **({"weights": d.weights} if weights else {}), **d.extra},
        )
        for d in datums
    ]


async def train(recipe: LossRecipe, client: trio.TrainingClient) -> list[float]:
    losses = []
    for update in range(UPDATES):
        batch = to_sdk(recipe.datums(update))
        trained = await client.forward_backward_async(batch, recipe.loss_fn, recipe.config)
        stepped = await client.optim_step_async(recipe.adam)
        losses.append((await trained).metrics["loss_sum"])
        await stepped
    return losses


def dpo(logprobs: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    gains = torch.stack([now.sum() - before.sum() for now, before in zip(logprobs, reference, strict=True)])
    return -F.logsigmoid(0.1 * (gains[0::2] - gains[1::2])).sum()


async def test_six_losses_and_a_custom_one_train_side_by_side(service: Service, client: trio.ServiceClient) -> None:
    jobs = [await recipe.create(client, "losses") for recipe in [*RECIPES, PAIRS]]
    starts = [await weights(service, job, "start") for job in jobs]
    pairs, batch = jobs[-1], to_sdk(PAIRS.datums(0), weights=False)
    scored = await (await pairs.forward_async(batch, "cross_entropy"))
    reference = [row["logprobs"].torch() for row in scored.loss_fn_outputs]

    def loss_fn(data: list[trio.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return dpo(logprobs, reference), {"pairs": len(data) / 2}

    async def train_pairs() -> list[float]:
        losses = []
        for _ in range(UPDATES):
            trained = await pairs.forward_backward_custom_async(batch, loss_fn)
            stepped = await pairs.optim_step_async(PAIRS.adam)
            output = await trained
            await stepped
            assert output.metrics["pairs"] == 4
            losses.append(output.metrics["loss_sum"])
        return losses

    *found, custom = await asyncio.gather(*map(train, RECIPES, jobs), train_pairs())
    for recipe, job, start, losses in zip(RECIPES, jobs, starts, found, strict=False):
        oracle = oracle_of(recipe, start)
        for update, loss in enumerate(losses):
            expected, _ = oracle.forward_backward(recipe.datums(update), recipe.loss_fn, recipe.config)
            oracle.optim_step(step_of(recipe.adam))
            assert loss == pytest.approx(expected, rel=1e-5, abs=1e-4), (recipe.name, update)
        assert oracle.difference(await weights(service, job, "end")) <= TOLERANCE, recipe.name

    oracle = oracle_of(PAIRS, starts[-1])
    for loss in custom:
        assert loss == pytest.approx(oracle.custom(PAIRS.datums(0), lambda p: dpo(p, reference)), abs=1e-4)
        oracle.optim_step(step_of(PAIRS.adam))
    assert oracle.difference(await weights(service, pairs, "end")) <= TOLERANCE
    assert custom[0] == pytest.approx(4 * math.log(2), abs=1e-4)
    assert custom[-1] < custom[0]
    for job in jobs:
        await (await job.end_async())


async def test_forward_gives_the_loss_and_leaves_no_gradient(service: Service, client: trio.ServiceClient) -> None:
    recipe = RECIPES[1]
    async with await recipe.create(client, "forward") as job:
        batch = to_sdk(recipe.datums(0))
        scored = await (await job.forward_async(batch, recipe.loss_fn))
        with pytest.raises(trio.NoGradient):
            await (await job.optim_step_async(recipe.adam))
        trained = await (await job.forward_backward_async(batch, recipe.loss_fn))
        assert scored.metrics == trained.metrics
        for one, other in zip(scored.loss_fn_outputs, trained.loss_fn_outputs, strict=True):
            np.testing.assert_array_equal(one["logprobs"].array, other["logprobs"].array)
