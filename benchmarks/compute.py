"""The fused pass against PEFT one job after another, and against the floor: the frozen base model without any LoRA.

    python -m benchmarks.compute            a few minutes; writes benchmarks/results/compute.json
    python -m benchmarks.compute --quick    under a minute

All variants do the same work in the same process: J jobs, each 4 sequences of 64 tokens, rank 8 on every linear map of
the decoder layers. Rounds are interleaved (fused, PEFT, floor, fused, …), so that a busy machine slows all of them,
and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from mainspring_broker import base_models
from mainspring_broker.wire import ForwardBackward, Init, Jagged, OptimStep
from mainspring_workers.base_model import BaseModel
from mainspring_workers.engine import Engine, WorkItem
from mainspring_workers.storage import open_storage

RESULTS = Path(__file__).parent / "results"
SEQUENCES, LENGTH, RANK = 4, 64, 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MICRO_BATCH_TOKENS = 1024
GOALS = {"tiny": (2.0, 2.7), "13m": (1.3, 1.5)}  # fused over PEFT: must stand, wanted


def random_llama(hidden: int, ff: int, layers: int, heads: int, kv_heads: int, vocab: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def make_tiny() -> tuple[str, Any]:
    """The shipped model, or a random one of about its size where it is missing."""
    path = base_models.resolve("mainspring-tiny")
    if (Path(path) / "config.json").exists():
        return "mainspring-tiny", transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return "random 260k", random_llama(64, 172, 5, 8, 4, 512)


def make_13m() -> tuple[str, Any]:
    return "random 13M", random_llama(384, 1024, 6, 6, 2, 4096)


MODELS: dict[str, Callable[[], tuple[str, Any]]] = {"tiny": make_tiny, "13m": make_13m}


class Fused:
    """One engine, J jobs; a cycle is one call of run."""

    def __init__(self, model: Any, tokens: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> None:
        self.jobs = [f"job-{j}" for j in range(len(tokens))]
        base = BaseModel(model, name="benchmark", path="benchmark")
        storage = open_storage(str(RESULTS))
        self.engine = Engine(base, storage=storage, micro_batch_tokens=MICRO_BATCH_TOKENS, slots=len(tokens))
        init = Init(rank=RANK, seed=0, train_unembed=False)
        self._run([WorkItem(job, 1, "init", init) for job in self.jobs])
        lengths = np.full(SEQUENCES, LENGTH, np.int32)
        self.forward_backwards = [
            WorkItem(job, 2, "forward_backward", self._operation(t.reshape(-1), y.reshape(-1), lengths))
            for job, t, y in zip(self.jobs, tokens, targets, strict=True)
        ]
        self.optim_steps = [WorkItem(job, 3, "optim_step", OptimStep()) for job in self.jobs]

    def _operation(self, tokens: Any, targets: Any, lengths: Any) -> ForwardBackward:
        return ForwardBackward(
            "cross_entropy",
            Jagged(tokens.astype(np.int32), lengths),
            {"target_tokens": Jagged(targets.astype(np.int32), lengths)},
        )

    def _run(self, items: list[WorkItem]) -> None:
        for outcome in self.engine.run(items):
            if outcome.error is not None:
                raise outcome.error

    def forward_backward(self) -> None:
        self._run(self.forward_backwards)

    def optim_step(self) -> None:
        self._run(self.optim_steps)


class Peft:
    """A PEFT model with J adapters, used one after another, and one AdamW each: the naive multi-tenant server."""

    def __init__(self, model: Any, tokens: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> None:
        model.requires_grad_(False)
        config = peft.LoraConfig(r=RANK, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS)
        self.names = [f"job-{j}" for j in range(len(tokens))]
        self.model = peft.get_peft_model(model, config, adapter_name=self.names[0])
        for name in self.names[1:]:
            self.model.add_adapter(name, config)
        self.model.eval()
        self.data = [(torch.from_numpy(t), torch.from_numpy(y)) for t, y in zip(tokens, targets, strict=True)]
        self.optimizers = []
        for name in self.names:
            self.model.set_adapter(name)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizers.append(torch.optim.AdamW(parameters, lr=1e-4))

    def forward_backward(self) -> None:
        for name, (tokens, targets) in zip(self.names, self.data, strict=True):
            self.model.set_adapter(name)
            logits = self.model(input_ids=tokens, use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def optim_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Floor:
    """Frozen base model, forward, loss, and backward down to the embeddings, in the same micro-batches: no LoRA."""

    def __init__(self, model: Any, tokens: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> None:
        self.model = model.eval().requires_grad_(False)
        size = MICRO_BATCH_TOKENS // LENGTH
        flat_tokens, flat_targets = torch.from_numpy(tokens).flatten(0, 1), torch.from_numpy(targets).flatten(0, 1)
        self.data = list(zip(flat_tokens.split(size), flat_targets.split(size), strict=True))

    def forward_backward(self) -> None:
        for tokens, targets in self.data:
            embedded = self.model.get_input_embeddings()(tokens).requires_grad_()
            logits = self.model(inputs_embeds=embedded, use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()


def measure(size: str, jobs: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Medians in milliseconds, and the ratios, for `jobs` jobs on one model."""

    def timed(call: Callable[[], None]) -> float:
        start = clock()
        call()
        return (clock() - start) * 1000

    name, model = MODELS[size]()
    rng = np.random.default_rng(0)
    data = rng.integers(0, model.config.vocab_size, (jobs, SEQUENCES, LENGTH + 1))
    tokens, targets = np.ascontiguousarray(data[..., :-1]), np.ascontiguousarray(data[..., 1:])
    parameters = sum(p.numel() for p in model.parameters())
    # Each variant changes the model in its own way, so each gets its own.
    variants = {"fused": Fused(model, tokens, targets), "peft": Peft(MODELS[size]()[1], tokens, targets)}
    floor = Floor(MODELS[size]()[1], tokens, targets)
    passes: dict[str, Callable[[], None]] = {key: variant.forward_backward for key, variant in variants.items()}
    passes["floor"] = floor.forward_backward
    times: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        for key, call in passes.items():
            elapsed = timed(call)
            if round_:  # the first round warms up
                times.setdefault(f"{key}_ms", []).append(elapsed)
        for key, variant in variants.items():
            elapsed = timed(variant.optim_step)
            if round_:
                times.setdefault(f"{key}_optim_ms", []).append(elapsed)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "model": name,
        "size": size,
        "parameters": parameters,
        "jobs": jobs,
        "tokens": jobs * SEQUENCES * LENGTH,
        "rounds": rounds,
        **{key: round(value, 2) for key, value in medians.items()},
        "over_peft": round(medians["peft_ms"] / medians["fused_ms"], 2),
        "of_floor": round(medians["floor_ms"] / medians["fused_ms"], 2),
        "optim_over_peft": round(medians["peft_optim_ms"] / medians["fused_optim_ms"], 1),
        "must": GOALS[size][0],
        "wanted": GOALS[size][1],
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"J jobs × {SEQUENCES} × {LENGTH} tokens, rank {RANK}: median ms of forward + backward of all jobs"
    )
    for column in (
        "model",
        "J",
        "fused",
        "PEFT",
        "floor",
        "fused over PEFT",
        "part of the floor",
        "optimizer over PEFT",
    ):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        good = "green" if row["over_peft"] >= row["wanted"] else "yellow" if row["over_peft"] >= row["must"] else "red"
        table.add_row(
            row["model"],
            str(row["jobs"]),
            *(f"{row[key]:.0f}" for key in ("fused_ms", "peft_ms", "floor_ms")),
            f"[{good}]{row['over_peft']:.2f}x[/] (must {row['must']}x, wanted {row['wanted']}x)",
            f"{row['of_floor']:.0%}",
            f"{row['optim_over_peft']:.0f}x",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compute",
        description="How much faster is one fused pass for many jobs than PEFT running one job after another?",
        epilog="The floor is the base model alone: no LoRA can be faster. Run it on a quiet machine; a second busy "
        "torch process makes every number meaningless.",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: under a minute, rough figures")
    parser.add_argument("--jobs", type=int, default=16, metavar="J", help="jobs in the cycle (default: %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="interleaved rounds (default: 15 for tiny, 7 for 13m)")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="only this model (default: both)")
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads (default: torch's own choice)")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count processor time instead of time on the clock, for a machine that is not quiet; needs --threads 1",
    )
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time needs --threads 1: waiting threads would be counted as working")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    default_rounds = {"tiny": 5, "13m": 1} if arguments.quick else {"tiny": 15, "13m": 7}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    rows = [
        measure(size, arguments.jobs, arguments.rounds or default_rounds[size], clock)
        for size in arguments.model or ["tiny", "13m"]
    ]
    show(rows)
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "clock": "processor time" if arguments.cpu_time else "wall",
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
    (RESULTS / "compute.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    return 0 if all(row["over_peft"] >= row["must"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
