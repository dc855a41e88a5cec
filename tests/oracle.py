"""The yardstick: one job alone, trained with plain PyTorch and PEFT, one datum at a time, nothing clever anywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from mainspring_broker.wire import Init, OptimStep
from tests.tiny import Datum, Driver, optim, peft_targets, random_datums, tiny_model


@contextmanager
def peft_on_new_transformers() -> Iterator[None]:
    """PEFT 0.21 asks transformers 5.24 for an attribute that was renamed, which warns; every other warning stays."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}


def plain_loss(name: str, logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """The loss of each token, written as the formula stands, for autograd to differentiate."""
    config = DEFAULTS[name] | dict(config)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if name == "cross_entropy":
        return -inputs["weights"] * logp
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(logp - q)
    gain = {
        "importance_sampling": lambda: ratio * advantages,
        "ppo": lambda: torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        "cispo": lambda: ratio.clamp(low, high).detach() * logp * advantages,
        "dro": lambda: logp * advantages - 0.5 * config["beta"] * (logp - q) ** 2,
    }[name]()
    return -inputs["weights"] * gain


class Oracle:
    """A PEFT model with a torch.optim.AdamW of its own.

    Args:
        model: a fresh transformers model; it is taken over.
        target_modules: names for PEFT.
        matrices: A and B to start from, by target name.
        init: rank and alpha.
    """

    def __init__(
        self, model: Any, target_modules: Sequence[str], matrices: Mapping[str, tuple[Tensor, Tensor]], init: Init
    ) -> None:
        config = LoraConfig(
            r=init.rank, lora_alpha=init.alpha, lora_dropout=0.0, bias="none", target_modules=list(target_modules)
        )
        with peft_on_new_transformers():
            self.model = get_peft_model(model.float().eval(), config)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        assert len(self.parameters) == 2 * len(matrices), "PEFT adapts other linear maps than the engine"
        with torch.no_grad():
            for name, pair in matrices.items():
                for letter, matrix in zip("AB", pair, strict=True):
                    self._parameter(name, letter).copy_(matrix)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), foreach=False)

    def _parameter(self, name: str, letter: str) -> Tensor:
        return self.parameters[f"base_model.model.{name}.lora_{letter}.default.weight"]

    def logprobs(self, datum: Datum) -> Tensor:
        """Log-probability of each target, 0 where it is ignored."""
        logits = self.model(input_ids=torch.from_numpy(datum.tokens).long()[None]).logits[0]
        targets = torch.from_numpy(datum.targets).long()
        picked = torch.log_softmax(logits, -1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        return torch.where(targets >= 0, picked, 0.0)

    def forward_backward(
        self, datums: Sequence[Datum], loss_fn: str = "cross_entropy", config: Mapping[str, float] | None = None
    ) -> tuple[float, list[Tensor]]:
        """Loss sum, and log-probabilities of each datum; gradients accumulate."""
        total, logprobs = 0.0, []
        for datum in datums:
            logp = self.logprobs(datum)
            inputs = {name: torch.from_numpy(v) for name, v in {"weights": datum.weights, **datum.extra}.items()}
            each = plain_loss(loss_fn, logp, inputs, config or {})
            loss = each[torch.from_numpy(datum.targets) >= 0].sum()
            loss.backward()
            total += loss.item()
            logprobs.append(logp.detach())
        return total, logprobs

    def custom(self, datums: Sequence[Datum], loss_fn: Callable[[list[Tensor]], Tensor]) -> float:
        """A loss of the log-probabilities of all datums together; gradients accumulate."""
        loss = loss_fn([self.logprobs(datum) for datum in datums])
        loss.backward()
        return loss.item()

    def optim_step(self, op: OptimStep) -> float:
        """One AdamW step; the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group.update(lr=op.learning_rate, betas=(op.beta1, op.beta2), eps=op.eps, weight_decay=op.weight_decay)
        limit = op.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def difference(self, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> float:
        """Largest absolute difference of any weight."""
        return max(
            float((self._parameter(name, letter).detach() - matrix).abs().max())
            for name, pair in matrices.items()
            for letter, matrix in zip("AB", pair, strict=True)
        )


@dataclass(frozen=True)
class Job:
    """What one job does in each of its updates."""

    name: str
    init: Init
    lengths: tuple[int, ...]
    step: OptimStep = field(default_factory=optim)

    def datums(self, update: int) -> list[Datum]:
        return random_datums(1000 * self.init.seed + update, self.lengths)


MINE = Job("mine", Init(rank=8, seed=1), (7, 12, 7, 5), optim(3e-3, weight_decay=0.01))
NEIGHBOURS = [
    Job("n2", Init(rank=4, seed=2), (3,), optim(1e-3)),
    Job("n3", Init(rank=8, seed=3), (20, 11), optim(1e-3, grad_clip_norm=0.5)),
    Job("n4", Init(rank=16, seed=4, train_unembed=False), (1, 2, 3, 4, 5), optim(5e-3, weight_decay=0.5)),
    Job("n5", Init(rank=1, seed=5, train_mlp=False), (7, 7), optim(1e-3, beta1=0.5, beta2=0.9)),
    Job("n6", Init(rank=12, seed=6, train_attn=False), (30,), optim(1e-3, eps=1e-4)),
    Job("n7", Init(rank=8, seed=7), (7, 12, 7, 5), optim(1e-4)),
    Job("n8", Init(rank=8, seed=8, train_attn=False, train_mlp=False), (9, 9, 2), optim(3e-3)),
]


def oracle_for(driver: Driver, job: Job, family: str = "llama") -> Oracle:
    """An oracle that starts from the weights that `job` has now."""
    return Oracle(tiny_model(family), peft_targets(family, job.init), driver.matrices(job.name), job.init)
