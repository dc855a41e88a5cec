"""What goes into a training client and what comes out of its futures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def as_array(value: Any) -> NDArray[Any]:
    """`value` (list, array, tensor, TensorData) as an array of its own dtype; bfloat16 and float16 become float32.

    Anything goes in: what has no wire form is refused when it is submitted, where its datum and its name are known.
    """
    if isinstance(value, TensorData):
        return value.array
    torch_module = sys.modules.get("torch")  # whoever has a tensor has imported torch
    if torch_module is not None and isinstance(value, torch_module.Tensor):
        tensor = value.detach().cpu()
        if tensor.dtype in (torch_module.bfloat16, torch_module.float16):
            tensor = tensor.float()
        result: NDArray[Any] = tensor.numpy()
        return result
    try:
        return np.asarray(value)
    except ValueError:  # rows of different lengths
        return np.array(value, dtype=object)


class TensorData:
    """A tensor as data: made from a list, a numpy array or a torch tensor, and turned back into any of them.

    Attributes:
        array: the values, float32 or int32 when they come from the service.
    """

    __slots__ = ("array",)

    def __init__(self, data: Any) -> None:
        self.array = as_array(data)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        """numpy's name of the dtype, e.g. "float32"."""
        return self.array.dtype.name

    def __len__(self) -> int:
        return len(self.array)

    def tolist(self) -> list[Any]:
        values: list[Any] = self.array.tolist()
        return values

    def numpy(self) -> NDArray[Any]:
        """A copy that may be written to."""
        return self.array.copy()

    def torch(self) -> torch.Tensor:
        """A CPU tensor of its own memory. Imports torch."""
        import torch

        return torch.from_numpy(self.array.copy())

    def __repr__(self) -> str:
        values = np.array2string(self.array, threshold=6, edgeitems=3, precision=4)
        return f"TensorData({values}, shape={list(self.shape)}, dtype={self.dtype})"


class ModelInput:
    """The tokens of one sequence.

    Attributes:
        tokens: int array of shape [length].
    """

    __slots__ = ("tokens",)

    def __init__(self, tokens: Any) -> None:
        self.tokens = as_array(tokens)

    @classmethod
    def from_ints(cls, tokens: Any) -> ModelInput:
        """From token ids: a list, a numpy array or a torch tensor with one dimension."""
        return cls(tokens)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return int(self.tokens.size)

    def to_ints(self) -> list[int]:
        ids: list[int] = self.tokens.tolist()
        return ids

    def __repr__(self) -> str:
        return f"ModelInput({np.array2string(self.tokens, threshold=6, edgeitems=3)}, length={self.length})"


class Datum:
    """One training example.

    Args:
        model_input: the tokens that the model reads; a list, array or tensor of ids is taken as ModelInput.from_ints.
        loss_fn_inputs: what the loss function needs, by name; each a list, array, tensor or TensorData as long as
            `model_input`. For "cross_entropy": `target_tokens` (the token that each position should predict) and,
            optionally, `weights` (default 1.0 everywhere). The losses for sampled tokens ("importance_sampling", "ppo",
            "cispo", "dro") need `logprobs` and `advantages` too.
    """

    __slots__ = ("loss_fn_inputs", "model_input")

    def __init__(self, model_input: ModelInput | Any, loss_fn_inputs: Mapping[str, Any]) -> None:
        self.model_input = model_input if isinstance(model_input, ModelInput) else ModelInput(model_input)
        self.loss_fn_inputs = {
            name: value if isinstance(value, TensorData) else TensorData(value)
            for name, value in loss_fn_inputs.items()
        }

    def __repr__(self) -> str:
        return f"Datum({self.model_input!r}, loss_fn_inputs: {', '.join(self.loss_fn_inputs) or 'none'})"


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hyperparameters of one optim_step: Adam with decoupled weight decay."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled: weights shrink by learning_rate * weight_decay a step
    grad_clip_norm: float = 0.0  # global norm of this job's own gradient; 0 means no clipping


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of forward_backward and forward.

    Attributes:
        loss_fn_outputs: one map a datum, in the batch's order; `logprobs` (float32, [length]) is the log-probability of
            each target token.
        metrics: `loss_sum` over all tokens, `loss_mean` and `token_count`.
    """

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """Result of optim_step.

    Attributes:
        metrics: `grad_norm` before clipping, `step` (1 for the first), `learning_rate`.
    """

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """Result of save_state and save_weights_for_sampler."""

    path: str  # what load_state and the like take
    location: str  # folder or URL where the service has put it, an adapter in PEFT's format
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    """Result of load_state and load_state_with_optimizer."""

    path: str
    step: int  # optimizer steps that the job's optimizer remembers: 0 without


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """What a pool serves, and its limits. A limit is None when the pool sets none."""

    base_model: str
    base_model_path: str  # where workers load it from: a folder or a hub id
    vocab_size: int  # token ids are 0 to vocab_size - 1
    max_length: int  # tokens of one sequence
    max_backlog: int | None  # unfinished requests of one job
    max_backlog_bytes: int | None  # payload of a job's unfinished requests
    max_payload_bytes: int | None  # payload of one request
    token_budget: int | None  # tokens of one cycle on one worker
