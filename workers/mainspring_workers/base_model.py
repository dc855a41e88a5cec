"""The frozen base model: any causal LM of transformers whose attention can be packed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mainspring_broker import base_models
from mainspring_workers import attention
from mainspring_workers.adapters import Target
from mainspring_workers.attention import PackedSequences
from mainspring_workers.fused_linear import Context, FusedLinear
from mainspring_workers.head import Head
from mainspring_workers.plan import plan_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The flag that switches LoRA on → last part of the names of the linear maps it means: Llama, Mistral, Qwen2, Qwen3
# and their like; GPT-NeoX.
KINDS = {
    "attn": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "query_key_value", "attention.dense"}),
    "mlp": frozenset({"gate_proj", "up_proj", "down_proj", "dense_h_to_4h", "dense_4h_to_h"}),
}


class BaseModel:
    """One frozen base model on one device, with its linear maps replaced by FusedLinear.

    Attributes:
        name: as it was asked for; path: where it was loaded from.
        vocab_size: token ids are 0 … vocab_size − 1.
        max_length: most tokens of one sequence.
        targets: every linear map that can carry LoRA, in the model's order, the head last.
        context: set `context.work` to run with LoRA.
    """

    def __init__(self, model: Any, *, name: str, path: str) -> None:
        """Takes over `model` (a transformers causal LM on its device): freezes it and replaces its linear maps.

        Raises:
            ValueError: the model cannot be served: its packed forward does not equal its ordinary one, or it has no
                linear head, or no limit of positions.
        """
        self.name = name
        self.path = path
        model.eval().requires_grad_(False)
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        linear = model.get_output_embeddings()
        if type(linear) is not nn.Linear:
            raise ValueError(f"{name} has no linear output head")
        self.vocab_size = min(int(linear.weight.shape[0]), int(model.get_input_embeddings().weight.shape[0]))
        self.max_length = _max_length(model.config)
        self.context = Context(self.device)
        probe = self._probe()
        expected = self._plain_logits(probe)
        layers = self._install(linear)
        model.config._attn_implementation = attention.NAME
        self.context.trace = []
        self._check(probe, expected, linear)
        self.targets = self._find_targets(layers, linear)
        self.context.trace = None
        self.head = Head(linear.weight, linear.bias, len(layers))

    @classmethod
    def load(cls, name: str, *, device: str = "cpu", dtype: str = "float32") -> BaseModel:
        """Load by the name of a shipped model, a directory, or a Hugging Face id.

        Args:
            dtype: of the frozen weights, "float32" or "bfloat16". Adapters are float32 either way.
        """
        from transformers import AutoModelForCausalLM

        path = base_models.resolve(name)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
        return cls(model.to(device), name=name, path=path)

    @property
    def facts(self) -> dict[str, Any]:
        """What clients and the clock may want to know."""
        return {
            "base_model": self.name,
            "base_model_path": self.path,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def hidden(self, tokens: Tensor, positions: Tensor, packed: PackedSequences) -> Tensor:
        """Last hidden states [T, D] of packed `tokens` [T] at `positions` [T], after the final norm."""
        backbone = self.model.base_model
        out = backbone(input_ids=tokens[None], position_ids=positions[None], use_cache=False, packed=packed)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _install(self, head: nn.Linear) -> dict[str, FusedLinear]:
        """Replace the linear maps that can carry LoRA; the new ones by name, in the model's order."""
        modules = dict(self.model.named_modules())
        layers: dict[str, FusedLinear] = {}
        for name, module in modules.items():
            if _sort(name)[1] is None or type(module) is not nn.Linear or module is head:
                continue
            parent, _, leaf = name.rpartition(".")
            layers[name] = FusedLinear(module, len(layers), self.context)
            setattr(modules[parent], leaf, layers[name])
        return layers

    def _find_targets(self, layers: dict[str, FusedLinear], head: nn.Linear) -> tuple[Target, ...]:
        """The targets; those which the traced forward called one after another on the same tensor read one input."""
        calls = pairwise(self.context.trace or ())
        shared = {index for (before, x), (index, same_x) in calls if index == before + 1 and x is same_x}
        fused = list(layers.values())
        targets: list[Target] = []
        for index, (name, layer) in enumerate(layers.items()):
            suffix, kind = _sort(name)
            assert kind is not None
            joins = index in shared and targets[-1].kind == kind
            d_out, d_in = layer.weight.shape
            targets.append(Target(name, suffix, kind, d_in, d_out, targets[-1].reads if joins else index))
        for layer, target in zip(fused, targets, strict=True):
            layer.readers = [fused[i] for i, other in enumerate(targets) if other.reads == target.reads]
        head_name = next(name for name, module in self.model.named_modules() if module is head)
        targets.append(Target(head_name, head_name, "unembed", head.in_features, head.out_features, len(targets)))
        return tuple(targets)

    def _probe(self) -> list[np.ndarray[Any, Any]]:
        """Two short sequences, to see whether packing changes anything."""
        long, short = min(7, self.max_length), min(4, self.max_length)
        return [np.arange(size) * 37 % self.vocab_size for size in (long, short)]

    @torch.no_grad()
    def _plain_logits(self, sequences: list[np.ndarray[Any, Any]]) -> Tensor:
        batches = [torch.from_numpy(sequence)[None].to(self.device) for sequence in sequences]
        return torch.cat([self.model(input_ids=batch, use_cache=False).logits[0] for batch in batches]).float()

    @torch.no_grad()
    def _check(self, sequences: list[np.ndarray[Any, Any]], expected: Tensor, head: nn.Linear) -> None:
        """Soft-capped or scaled logits, linear attention, … would show here, before anyone trains on nonsense."""
        lengths = np.array([len(sequence) for sequence in sequences])
        tokens = torch.from_numpy(np.concatenate(sequences)).to(self.device)
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(self.device)
        packed = PackedSequences.of(plan_attention(lengths), self.device)
        logits = F.linear(self.hidden(tokens, positions, packed), head.weight, head.bias).float()
        tolerance = (1e-3 if self.dtype == torch.float32 else 5e-2) * max(1.0, float(expected.abs().max()))
        difference = float((logits - expected).abs().max())
        if not difference <= tolerance:
            kind = type(self.model).__name__
            raise ValueError(f"{kind} cannot be served: packed logits differ from its own by {difference:.3g}")


def _sort(name: str) -> tuple[str, str | None]:
    """The suffix and the kind of the linear map `name`; kind None: it never carries LoRA."""
    for kind, suffixes in KINDS.items():
        for suffix in suffixes:
            if name.endswith("." + suffix):
                return suffix, kind
    return name, None


def _max_length(config: Any) -> int:
    """Positions the model was made for. Rotary variants that change with the longest sequence stay below the switch,
    so that a neighbour's length cannot change anybody's positions."""
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"{config.model_type} does not say how many positions it was made for")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        length = min(length, int(rope.get("original_max_position_embeddings") or length))
    return int(length)
