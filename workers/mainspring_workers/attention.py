"""Causal attention over sequences packed one behind the other, without a mask and without padding.

Sequences of exactly equal length share one call; nothing of a neighbour enters, not even its length. (A dense mask
over the packed rows would cost T², and leak: softmax weight 0 times a neighbour's NaN is NaN.)

Registered with transformers under NAME. A model whose attention goes through transformers' AttentionInterface then
builds no mask and hands over query [1, H, T, D], key and value [1, K, T, D]; `packed` travels as a keyword argument.

    T  packed tokens      H, K  query and key heads      D  head width      S, L  sequences of a group, their length
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from mainspring_workers.plan import AttentionPlan

NAME = "mainspring_packed"


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """An AttentionPlan on the device."""

    groups: tuple[tuple[int, int], ...]  # (S, L)
    order: Tensor | None  # [T]
    inverse: Tensor | None  # [T]

    @classmethod
    def of(cls, plan: AttentionPlan, device: torch.device) -> PackedSequences:
        if plan.order is None or plan.inverse is None:
            return cls(plan.groups, None, None)
        order, inverse = torch.from_numpy(plan.order), torch.from_numpy(plan.inverse)
        return cls(plan.groups, order.to(device), inverse.to(device))


class _Permute(torch.autograd.Function):
    """x[order]. Its gradient is dy[inverse], a gather; index_select's own would be a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.order, ctx.inverse = order, inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse), None, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: PackedSequences | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, T, H, D].

    Raises:
        ValueError: the model did not pass `packed` through, or wants an attention that is not softmax(q kᵀ) v.
    """
    if packed is None or softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} cannot be packed: it drops keyword arguments, caps scores, or has sinks"
        )
    grouped = [_grouped(tensor, packed) for tensor in (query, key, value)]
    outputs = []
    for (count, length), q, k, v in zip(packed.groups, *grouped, strict=True):
        out = F.scaled_dot_product_attention(
            q.unflatten(0, (count, length)).transpose(1, 2),  # [S, H, L, D]
            k.unflatten(0, (count, length)).transpose(1, 2),
            v.unflatten(0, (count, length)).transpose(1, 2),
            attn_mask=_window_mask(length, sliding_window, q.device),
            is_causal=sliding_window is None or length <= sliding_window,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [S·L, H, D]
    packed_out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packed.order is not None:
        packed_out = _Permute.apply(packed_out, packed.inverse, packed.order)  # type: ignore[no-untyped-call]
    return packed_out.unsqueeze(0), None


def _grouped(tensor: Tensor, packed: PackedSequences) -> tuple[Tensor, ...]:
    """`tensor` [1, H, T, D] as one [S·L, H, D] a group."""
    rows = tensor[0].transpose(0, 1)
    if packed.order is not None:
        rows = _Permute.apply(rows, packed.order, packed.inverse)  # type: ignore[no-untyped-call]
    return torch.split(rows, [count * length for count, length in packed.groups])


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query may look: at itself and the `window` − 1 tokens before. None: at all before it."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)
