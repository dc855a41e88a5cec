"""Jobs that train through the whole service, each with the oracle beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import mainspring as trio
from mainspring_broker import base_models
from mainspring_broker.wire import Init, OptimStep
from tests.oracle import Oracle
from tests.service import Service
from tests.tiny import Datum, peft_targets, random_datums

BASE_MODEL = "mainspring-tiny"
VOCAB = 1024
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Recipe:
    """What one client does."""

    name: str
    rank: int
    seed: int
    lengths: tuple[int, ...]
    adam: trio.AdamParams
    flags: dict[str, bool] = field(default_factory=dict)

    def datums(self, update: int) -> list[Datum]:
        return random_datums(1000 * self.seed + update, self.lengths, VOCAB)

    async def create(self, client: trio.ServiceClient, prefix: str) -> trio.TrainingClient:
        return await client.create_lora_training_client_async(
            BASE_MODEL, rank=self.rank, seed=self.seed, job=f"{prefix}-{self.name}", **self.flags
        )


def adam(learning_rate: float = 1e-3, **changes: float) -> trio.AdamParams:
    """Settings under which two correct programs agree.

    Random tokens give gradients of norm 500 and more, whose rounding errors are near 1e-4. An eps far below that makes
    whole steps of them wherever the true gradient is about zero: then plain PEFT differs from itself, too, as soon as
    it sees the datums in another order.
    """
    return trio.AdamParams(learning_rate=learning_rate, **({"eps": 1e-3} | changes))


MINE = Recipe("mine", 8, 1, (17, 40, 17, 9), adam(weight_decay=0.01))
NEIGHBOURS = [
    Recipe("n2", 4, 2, (33,), adam()),
    Recipe("n3", 8, 3, (80, 21), adam(3e-3, grad_clip_norm=0.5)),
    Recipe("n4", 16, 4, (5, 6, 7, 8), adam(2e-3, weight_decay=0.5), {"train_unembed": False}),
    Recipe("n5", 1, 5, (17, 17), adam(1e-4), {"train_mlp": False}),
    Recipe("n6", 12, 6, (120,), adam(beta1=0.5), {"train_attn": False}),
    Recipe("n7", 8, 7, (17, 40, 17, 9), adam(5e-4)),
    Recipe("n8", 32, 8, (9, 9, 2), adam(2e-3)),
]


def to_sdk(datums: Sequence[Datum]) -> list[trio.Datum]:
    return [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(d.tokens),
            loss_fn_inputs={"target_tokens": d.targets, "weights": d.weights},
        )
        for d in datums
    ]


async def weights(service: Service, client: trio.TrainingClient, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The job's weights by target name, as an exported adapter has them."""
    saved = await (await client.save_weights_for_sampler_async(name))
    flat = load_file(Path(saved.location) / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in flat}
    return {n: tuple(flat[f"base_model.model.{n}.lora_{letter}.weight"] for letter in "AB") for n in names}  # type: ignore[misc]


def oracle_of(recipe: Recipe, start: dict[str, tuple[Tensor, Tensor]]) -> Oracle:
    init = Init(recipe.rank, recipe.seed, **recipe.flags)
    model = AutoModelForCausalLM.from_pretrained(base_models.resolve(BASE_MODEL), dtype=torch.float32)
    return Oracle(model, peft_targets("llama", init), start, init)


def step_of(adam: trio.AdamParams) -> OptimStep:
    return OptimStep(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm)


async def train(recipe: Recipe, client: trio.TrainingClient, updates: int, pieces: int = 1) -> list[dict[str, Any]]:
    """`updates` updates, each batch sent as `pieces` forward_backward calls; what the service said of each."""
    said = []
    for update in range(updates):
        batch = to_sdk(recipe.datums(update))
        parts = [list(part) for part in np.array_split(np.arange(len(batch)), pieces)]
        trained = [
            await client.forward_backward_async([batch[i] for i in part], "cross_entropy") for part in parts if part
        ]
        stepped = await client.optim_step_async(recipe.adam)
        outputs = [await future for future in trained]
        said.append(
            {
                "loss": sum(output.metrics["loss_sum"] for output in outputs),
                "logprobs": [row["logprobs"].numpy() for output in outputs for row in output.loss_fn_outputs],
                "grad_norm": (await stepped).metrics["grad_norm"],
            }
        )
    return said


def compare(recipe: Recipe, oracle: Oracle, said: Sequence[dict[str, Any]]) -> None:
    """The oracle trains the same updates; losses, log-probabilities and gradient norms agree on the way."""
    for update, each in enumerate(said):
        loss, logprobs = oracle.forward_backward(recipe.datums(update))
        norm = oracle.optim_step(step_of(recipe.adam))
        np.testing.assert_allclose(each["loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(each["grad_norm"], norm, rtol=1e-4)
        assert len(each["logprobs"]) == len(logprobs)
        for mine, theirs in zip(each["logprobs"], logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)
