"""Tiny random models, datums, and a driver for an Engine, for tests of the compute core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from mainspring_broker.wire import ForwardBackward, Init, Jagged, Operation, OptimStep, op_name
from mainspring_workers.adapters import Adapter
from mainspring_workers.base_model import BaseModel
from mainspring_workers.engine import Engine, Outcome, WorkItem
from mainspring_workers.storage import open_storage

torch.set_num_threads(1)  # matrices this small are slower on several threads, above all beside another process

VOCAB = 61
MAX_LENGTH = 48
FAMILIES = ("llama", "qwen2", "qwen3", "gpt_neox")
PEFT_TARGETS = {
    "llama": {"attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")},
    "gpt_neox": {"attn": ("query_key_value", "attention.dense"), "mlp": ("dense_h_to_4h", "dense_4h_to_h")},
}


def tiny_model(family: str = "llama", *, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A random two-layer transformers model; the same for the same arguments."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,  # or a random model would be nearly linear, and its gradients noise
    }
    if family != "gpt_neox":
        common |= {"num_key_value_heads": 2}
    if family == "qwen3":
        common |= {"head_dim": 8}
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
    }[family]
    model = model_class(config_class(**(common | changes)))
    with torch.no_grad():  # biases start at zero, where a mistake would not show
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def tiny_base(family: str = "llama", **changes: Any) -> BaseModel:
    return BaseModel(tiny_model(family, **changes), name=f"tiny-{family}", path=f"tiny-{family}")


def peft_targets(family: str, init: Init) -> list[str]:
    """The names that PEFT needs to adapt what `init` asks for."""
    names = PEFT_TARGETS["gpt_neox" if family == "gpt_neox" else "llama"]
    chosen = [*(names["attn"] if init.train_attn else ()), *(names["mlp"] if init.train_mlp else ())]
    return chosen + (["lm_head"] if init.train_unembed else [])


@dataclass(frozen=True)
class Datum:
    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]
    extra: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # other inputs of a loss


def random_datum(rng: np.random.Generator, length: int, vocab: int = VOCAB) -> Datum:
    """Random tokens; some targets ignored, some weights 0."""
    tokens = rng.integers(0, vocab, length + 1, dtype=np.int32)
    targets = tokens[1:].copy()
    targets[rng.random(length) < 0.1] = -100
    weights = rng.uniform(0.2, 1.0, length).astype(np.float32)
    weights[rng.random(length) < 0.1] = 0
    return Datum(tokens[:-1], targets, weights)


def random_datums(seed: int, lengths: Sequence[int], vocab: int = VOCAB) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [random_datum(rng, length, vocab) for length in lengths]


def random_episodes(seed: int, lengths: Sequence[int], vocab: int = VOCAB) -> list[Datum]:
    """As `random_datums`, with `logprobs` around those of a random model, and `advantages`, some of them 0."""
    rng = np.random.default_rng(seed)
    episodes = []
    for length in lengths:
        plain = random_datum(rng, length, vocab)
        advantages = rng.normal(size=length).astype(np.float32)
        advantages[rng.random(length) < 0.2] = 0
        logprobs = rng.normal(-np.log(vocab), 0.6, length).astype(np.float32)
        episodes.append(replace(plain, extra={"logprobs": logprobs, "advantages": advantages}))
    return episodes


def jagged(rows: Sequence[NDArray[Any]]) -> Jagged:
    lengths = np.array([len(row) for row in rows], np.int32)
    return Jagged(np.concatenate(rows) if rows else np.zeros(0, np.int32), lengths)


def batch(
    datums: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    backward: bool = True,
) -> ForwardBackward:
    return ForwardBackward(
        loss_fn,
        jagged([datum.tokens for datum in datums]),
        {
            "target_tokens": jagged([datum.targets for datum in datums]),
            "weights": jagged([datum.weights for datum in datums]),
            **{name: jagged([datum.extra[name] for datum in datums]) for name in (datums[0].extra if datums else ())},
        },
        config or {},
        backward=backward,
    )


class Driver:
    """An Engine, and the sequence numbers of its jobs."""

    def __init__(self, base: BaseModel, storage: Path | str = "unused", **settings: Any) -> None:
        self.engine = Engine(base, storage=open_storage(str(storage)), **settings)
        self.seqs: dict[str, int] = {}

    def item(self, job: str, operation: Any, op: str | None = None) -> WorkItem:
        """The job's next request."""
        self.seqs[job] = self.seqs.get(job, 0) + 1
        seq = self.seqs[job]
        return WorkItem(job, seq, op or op_name(operation), operation, chain=f"{job} {seq}")

    def run(self, *requests: tuple[str, Operation]) -> list[Outcome]:
        """One batch of (job, operation)."""
        return self.engine.run([self.item(job, operation) for job, operation in requests])

    def good(self, *requests: tuple[str, Operation]) -> list[dict[str, Any]]:
        """One batch in which nothing may fail; the results."""
        outcomes = self.run(*requests)
        for outcome in outcomes:
            if outcome.error is not None:
                raise AssertionError(f"{outcome.job} {outcome.seq}: {outcome.error!r}")
        return [outcome.result or {} for outcome in outcomes]

    def adapter(self, job: str) -> Adapter:
        adapter = self.engine._pool.get(job)
        assert adapter is not None
        return adapter

    def matrices(self, job: str) -> dict[str, tuple[Tensor, Tensor]]:
        """A copy of the job's weights by target name."""
        return {name: (a.clone(), b.clone()) for name, (a, b) in self.adapter(job).named_matrices.items()}


def optim(learning_rate: float = 1e-2, **changes: Any) -> OptimStep:
    return OptimStep(learning_rate=learning_rate, **({"eps": 1e-8} | changes))


def linear_probe(learning_rate: float = 1e3, eps: float = 1e3) -> OptimStep:
    """A step that is linear in the gradient: with betas 0 Adam moves by lr·g/(|g|+eps), here about lr/eps·g.

    An ordinary first step of Adam is lr·sign(g) and would hide any error of the gradient's scale.
    """
    return OptimStep(learning_rate=learning_rate, beta1=0.0, beta2=0.0, eps=eps)
