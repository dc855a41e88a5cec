"""Train the tiny base model that ships with Mainspring, from scratch, on the CPU.

The text is ``pydoc_data.topics``: the chapters of the Python language reference that
``help()`` shows. Every CPython carries them, so anybody can train the model again without
downloading anything. The result is an ordinary Llama folder that
``transformers.AutoModelForCausalLM`` and ``AutoTokenizer`` load, about 0.87 million
parameters, under 4 MB.
"""

from __future__ import annotations

import json
import math
import platform
import random
import time
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
VOCAB = 1024
POSITIONS = 512
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "broker" / "mainspring_broker" / "models" / "tiny"

console = Console()
app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Corpus:
    """Text split by topic: ``train`` and ``held_out`` map a topic's name to its text."""

    train: dict[str, str]
    held_out: dict[str, str]


@dataclass(frozen=True)
class Score:
    """Loss of one model on the held-out topics."""

    nats_per_token: float
    bits_per_byte: float


def load_corpus(held_out_share: float, seed: int) -> Corpus:
    """Split the topics so that about ``held_out_share`` of all characters are held out.

    Some topics repeat others word for word ("compound" contains all of "if", "for", "try").
    A paragraph is therefore kept once only, and the held-out topics keep theirs first:
    otherwise the held-out loss would partly measure memory.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    names = sorted(topics)
    random.Random(seed).shuffle(names)
    budget = held_out_share * sum(len(text) for text in topics.values())
    held_names: list[str] = []
    for name in names:
        # A few chapters are larger than the whole budget: those always train.
        if len(topics[name]) <= budget:
            held_names.append(name)
            budget -= len(topics[name])
    seen: set[str] = set()
    parts: dict[str, str] = {}
    for name in held_names + [name for name in names if name not in held_names]:
        kept = []
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) > 40 and key in seen:
                continue
            seen.add(key)
            kept.append(paragraph)
        parts[name] = "\n\n".join(kept)
    return Corpus(
        train={name: parts[name] for name in names if name not in held_names and parts[name].strip()},
        held_out={name: parts[name] for name in held_names if parts[name].strip()},
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ``VOCAB`` entries: ``<|end|>`` is id 0, then 256 bytes, then merges.

    All 256 bytes are in the alphabet and nothing is normalised, so any text comes back unchanged.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """A freshly initialised model; the same ``seed`` gives the same weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attention_dropout=0.0,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def to_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One flat int64 tensor of token ids ``[tokens]``: ``<|end|>`` before, between and after texts."""
    ids = [0]
    for text in texts:
        ids += [*tokenizer.encode(text, add_special_tokens=False), 0]
    return torch.tensor(ids)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: torch.Tensor, text_bytes: int) -> Score:
    """Predict every token of ``stream`` once, in windows of ``POSITIONS``; bytes are UTF-8."""
    model.eval()
    nats = 0.0
    for start in range(0, len(stream) - 1, POSITIONS):
        window = stream[start : start + POSITIONS + 1]
        logits = model(input_ids=window[None, :-1]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return Score(nats / (len(stream) - 1), nats / math.log(2) / text_bytes)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5 %, then a cosine down to a twentieth of ``peak``."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: LlamaForCausalLM,
    stream: torch.Tensor,
    *,
    steps: int,
    batch: int,
    peak_lr: float,
    decay: float,
    seed: int,
) -> float:
    """AdamW on random crops ``[batch, POSITIONS]`` of ``stream``; returns the last step's loss (nats/token)."""
    generator = torch.Generator().manual_seed(seed)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95))
    offsets = torch.arange(POSITIONS + 1)
    model.train()
    value = math.nan
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps, loss=value)
        for step in range(steps):
            starts = torch.randint(0, len(stream) - POSITIONS, (batch, 1), generator=generator)
            window = stream[starts + offsets]
            logits = model(input_ids=window[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak_lr)
            optimizer.step()
            value = loss.item()
            progress.update(bar, advance=1, loss=value)
    return value


def for_shipping(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The trained model with an output head of its own, its weights rounded to float16 (and computed in float32).

    Embedding and head are trained as one matrix, which suits little text, and are two from then on: stock PEFT warns
    whenever it loads an adapter on a head that is tied. Rounding keeps the file small.
    """
    config = LlamaConfig(**(model.config.to_dict() | {"tie_word_embeddings": False}))
    untied = LlamaForCausalLM(config)
    untied.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in untied.parameters():
            parameter.copy_(parameter.half())
    return untied


def save(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> None:
    """Write weights, tokenizer and ``training.json`` into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}  # exact, see `for_shipping`
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for the owner only; a wheel would carry that mode to every installation.
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder to write; the default replaces the shipped model.")] = (DEFAULT_OUT),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of batch x 512 tokens each.")] = 550,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of 512 tokens in one step.")] = 8,
    lr: Annotated[float, typer.Option(help="Highest learning rate (5 % warm-up, then cosine).")] = 4e-3,
    decay: Annotated[float, typer.Option(help="Weight decay of matrices; a little text needs a lot of it.")] = 1.0,
    held_out: Annotated[float, typer.Option(help="Share of the text, by topic, kept from training.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Picks the held-out topics, the first weights, the crops.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch. Part of the recipe.")] = 2,
) -> None:
    """Train the tiny base model from scratch on Python's own language reference.

    It learns a tokenizer (byte-level BPE, 1024 entries) and a Llama of about 0.87 million
    parameters, then compares it with an untrained model of the same shape on topics it never saw.

    The same seed, thread count, Python, torch build and kind of CPU give the same weights; another
    CPU may differ in the last bits, because it adds numbers up in another order.

    Try it out first: [bold]python scripts/train_base_model.py --steps 20 --out /tmp/tiny[/bold]
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    corpus = load_corpus(held_out, seed)
    train_texts, held_texts = list(corpus.train.values()), list(corpus.held_out.values())
    tokenizer = train_tokenizer(train_texts)
    train_stream, held_stream = to_stream(tokenizer, train_texts), to_stream(tokenizer, held_texts)
    held_bytes = sum(len(text.encode()) for text in held_texts)
    model = build_model(seed)
    untrained = evaluate(model, held_stream, held_bytes)
    console.print(
        f"{len(train_stream):,} tokens to train on, "
        f"{len(held_stream):,} held out ({', '.join(sorted(corpus.held_out))})"
    )
    last = train(model, train_stream, steps=steps, batch=batch, peak_lr=lr, decay=decay, seed=seed)
    model = for_shipping(model)
    parameters = sum(p.numel() for p in model.parameters())
    trained = evaluate(model, held_stream, held_bytes)
    minutes = (time.monotonic() - began) / 60

    table = Table(title=f"held-out topics, after {minutes:.1f} minutes")
    for column in ("model", "nats per token", "bits per byte"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, score in (("untrained", untrained), ("trained", trained)):
        table.add_row(name, f"{score.nats_per_token:.3f}", f"{score.bits_per_byte:.3f}")
    console.print(table)
    record = {
        "text": "pydoc_data.topics",
        "parameters": parameters,
        "trained": asdict(trained),
        "untrained": asdict(untrained),
        "last_train_loss": last,
        "train_tokens": len(train_stream),
        "held_out_tokens": len(held_stream),
        "held_out_bytes": held_bytes,
        "held_out_topics": sorted(corpus.held_out),
        "minutes": round(minutes, 2),
        "recipe": {
            "seed": seed,
            "steps": steps,
            "batch": batch,
            "sequence": POSITIONS,
            "peak_lr": lr,
            "decay": decay,
            "held_out_share": held_out,
            "threads": threads,
        },
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    save(out, model, tokenizer, record)
    size = (out / "model.safetensors").stat().st_size
    console.print(f"wrote {out} (model.safetensors: {size / 1e6:.2f} MB)")


if __name__ == "__main__":
    app()
