"""The parts of the fused pass, each against plain autograd: linear map, attention, head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mainspring_broker.wire import Init
from mainspring_workers import head as head_module
from mainspring_workers.adapters import Adapter, AdapterPool, Target
from mainspring_workers.attention import PackedSequences, packed_attention
from mainspring_workers.fused_linear import Context, FusedLinear
from mainspring_workers.head import Head, head_pass
from mainspring_workers.plan import LossRun, Run, plan_attention
from mainspring_workers.staging import Slab, Work, add_product

CPU = torch.device("cpu")
D_IN, D_OUT, VOCAB = 16, 24, 50
TARGETS = [
    Target("layers.0.q_proj", "q_proj", "attn", D_IN, D_OUT, 0),
    Target("lm_head", "lm_head", "unembed", D_IN, VOCAB, 2),
]


def trained(ranks: list[int], targets: list[Target] = TARGETS, **flags: bool) -> list[Adapter]:
    """Adapters with random weights, B included."""
    pool = AdapterPool(targets, slots=99, device=CPU)
    chosen = {"train_attn": True, "train_mlp": False, "train_unembed": True} | flags
    adapters = [pool.open(f"job-{i}", Init(rank=rank, seed=i, **chosen)) for i, rank in enumerate(ranks)]
    for adapter in adapters:
        adapter.weights.normal_(std=0.3)
    return adapters


def staged(slab: Slab) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Gradients of A and B by target, one map a job."""
    slab.finish()
    names = [target.name for target in slab.layout.targets]
    a, bt = slab.layout.matrices(slab.staged)
    return [{name: (a[i][j], bt[i][j].mT) for i, name in enumerate(names)} for j in range(len(slab.adapters))]


def close(got: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= 1e-5 * max(scale, 1.0)


# Two jobs of rank 4 with equally many rows (one bmm), then one of another length, then one of rank 8.
RANKS = [4, 4, 4, 8]
ROWS = [(0, 5), (5, 10), (10, 17), (17, 18)]
RUNS = [Run(0, 0, 2, 0, 10), Run(0, 2, 3, 10, 17), Run(1, 0, 1, 17, 18)]


def test_fused_linear_equals_autograd_for_each_job() -> None:
    torch.manual_seed(0)
    adapters = trained(RANKS)
    slabs = [
        Slab(adapters[0].layout, adapters[:3], torch.float32),
        Slab(adapters[3].layout, adapters[3:], torch.float32),
    ]
    linear = nn.Linear(D_IN, D_OUT).requires_grad_(False)
    context = Context(CPU)
    fused = FusedLinear(linear, 0, context)
    x, dy = torch.randn(1, 18, D_IN, requires_grad=True), torch.randn(1, 18, D_OUT)
    context.work = Work(slabs, RUNS)
    y = fused(x)
    y.backward(dy)
    grads = staged(slabs[0]) + staged(slabs[1])
    assert x.grad is not None
    for adapter, (start, end), grad in zip(adapters, ROWS, grads, strict=True):
        a, b = (m.clone().requires_grad_() for m in adapter.named_matrices["layers.0.q_proj"])
        own = x.detach()[0, start:end].clone().requires_grad_()
        expected = linear(own) + adapter.scaling * (own @ a.T) @ b.T
        expected.backward(dy[0, start:end])
        close(y.detach()[0, start:end], expected.detach())
        for got, want in zip((x.grad[0, start:end], *grad["layers.0.q_proj"]), (own.grad, a.grad, b.grad), strict=True):
            assert want is not None
            close(got, want)


def test_layers_that_read_one_input_equal_each_alone() -> None:
    torch.manual_seed(0)
    sizes = {"q": 24, "k": 8, "v": 12}
    linears = {name: nn.Linear(D_IN, size).requires_grad_(False) for name, size in sizes.items()}
    x, dys = torch.randn(1, 18, D_IN), [torch.randn(1, 18, size) for size in sizes.values()]
    seen = []
    for together in (False, True):
        torch.manual_seed(1)
        targets = [
            Target(f"layers.0.{n}", n, "attn", D_IN, o, 0 if together else i) for i, (n, o) in enumerate(sizes.items())
        ]
        adapters = trained(RANKS, targets, train_unembed=False)
        slabs = [Slab(group[0].layout, group, torch.float32) for group in (adapters[:3], adapters[3:])]
        context = Context(CPU)
        layers = [FusedLinear(linear, i, context) for i, linear in enumerate(linears.values())]
        if together:
            for layer in layers:
                layer.readers = layers
        context.work = Work(slabs, RUNS)
        own = x.clone().requires_grad_()
        outputs = [layer(own) for layer in layers]
        torch.autograd.backward(outputs, dys)
        assert own.grad is not None
        seen.append([own.grad, slabs[0].staged, slabs[1].staged, *(output.detach() for output in outputs)])
    for alone, shared in zip(*seen, strict=True):
        close(shared, alone)


def test_a_reader_that_comes_with_another_input_is_an_error() -> None:
    adapters = trained([4])
    context = Context(CPU)
    layers = [FusedLinear(nn.Linear(D_IN, D_OUT).requires_grad_(False), i, context) for i in (0, 1)]
    for layer in layers:
        layer.readers = layers
    context.work = Work([Slab(adapters[0].layout, adapters, torch.float32)], [])
    layers[0](torch.zeros(1, 3, D_IN))
    with pytest.raises(RuntimeError, match="share"):
        layers[1](torch.zeros(1, 3, D_IN))


def test_no_gradient_flows_below_the_first_adapted_layer() -> None:
    adapters = trained([4])
    slab = Slab(adapters[0].layout, adapters, torch.float32)
    context = Context(CPU)
    fused = FusedLinear(nn.Linear(D_IN, D_OUT).requires_grad_(False), 0, context)
    x = torch.randn(1, 3, D_IN)
    context.work = Work([slab], [Run(0, 0, 1, 0, 3)])
    fused(x).sum().backward()
    assert x.grad is None
    assert slab.staged.any()


def test_without_work_or_without_lora_there_it_is_the_base_layer() -> None:
    adapters = trained([4], train_attn=False)
    slab = Slab(adapters[0].layout, adapters, torch.float32)
    context = Context(CPU)
    linear = nn.Linear(D_IN, D_OUT).requires_grad_(False)
    fused = FusedLinear(linear, 0, context)
    x = torch.randn(1, 3, D_IN)
    assert fused(x).equal(linear(x))
    context.work = Work([slab], [Run(0, 0, 1, 0, 3)])
    y = fused(x)
    assert y.equal(linear(x))
    assert not y.requires_grad


def test_bfloat16_base_with_float32_gradients() -> None:
    torch.manual_seed(0)
    adapters = trained([4, 4])
    linear = nn.Linear(D_IN, D_OUT).requires_grad_(False)
    x, dy = torch.randn(1, 10, D_IN), torch.randn(1, 10, D_OUT)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        slab = Slab(adapters[0].layout, adapters, dtype)
        context = Context(CPU)
        context.work = Work([slab], [Run(0, 0, 2, 0, 10)])
        FusedLinear(linear.to(dtype), 0, context)(x.to(dtype)).backward(dy.to(dtype))
        assert slab.staged.dtype == torch.float32
        rows.append(slab.staged)
    assert float((rows[0] - rows[1]).abs().max()) <= 0.05 * float(rows[0].abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batched", [False, True])
def test_add_product_into_a_strided_view(dtype: torch.dtype, batched: bool) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 3, 4, dtype=dtype), torch.randn(2, 4, 5, dtype=dtype)
    out = torch.ones(2, 40)[:, 7:22].view(2, 3, 5)
    if batched:
        add_product(out, left, right)
        close(out, 1 + (left @ right).float())
    else:
        add_product(out[0], left[0], right[0])
        close(out[0], 1 + (left[0] @ right[0]).float())
        assert (out[1] == 1).all()


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1, 3, 3], [3, 1, 3, 7, 1]])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_equals_attention_of_each_sequence(lengths: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    total, heads, kv_heads, width = sum(lengths), 4, 2, 8
    q = torch.randn(1, heads, total, width, requires_grad=True)
    k, v = (torch.randn(1, kv_heads, total, width, requires_grad=True) for _ in "kv")
    dout = torch.randn(1, total, heads, width)
    packed = PackedSequences.of(plan_attention(np.array(lengths)), CPU)
    out, _ = packed_attention(nn.Identity(), q, k, v, None, scaling=0.3, packed=packed, sliding_window=window)
    out.backward(dout)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        own = [t.detach()[:, :, rows].clone().requires_grad_() for t in (q, k, v)]
        scores = 0.3 * own[0] @ own[1].repeat_interleave(2, 1).mT
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or math.inf))
        expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ own[2].repeat_interleave(2, 1)
        expected.backward(dout[:, rows].transpose(1, 2))
        close(out.detach()[:, rows].transpose(1, 2), expected.detach())
        for full, part in zip((q, k, v), own, strict=True):
            assert full.grad is not None
            assert part.grad is not None
            close(full.grad[:, :, rows], part.grad)


def test_attention_that_cannot_be_packed_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="cannot be packed"):
        packed_attention(nn.Identity(), q, q, q, None)
    packed = PackedSequences.of(plan_attention(np.array([2])), CPU)
    with pytest.raises(ValueError, match="caps scores"):
        packed_attention(nn.Identity(), q, q, q, None, packed=packed, softcap=30.0)


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_the_chunked_head_equals_autograd(chunk_rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "chunk_rows", lambda _: chunk_rows)
    torch.manual_seed(0)
    adapters = trained(RANKS)
    slabs = [
        Slab(adapters[0].layout, adapters[:3], torch.float32),
        Slab(adapters[3].layout, adapters[3:], torch.float32),
    ]
    runs = [Run(0, 0, 1, 0, 5), Run(0, 1, 2, 5, 10), Run(0, 2, 3, 10, 17), Run(1, 0, 1, 17, 18)]
    head = Head(torch.randn(VOCAB, D_IN), torch.randn(VOCAB) if bias else None, 1)
    hidden, targets = torch.randn(18, D_IN), torch.randint(0, VOCAB, (18,))
    weights = torch.rand(18)
    result = head_pass(
        head,
        hidden,
        targets,
        {"weights": weights},
        slabs,
        runs,
        [LossRun("cross_entropy", (), 0, 12), LossRun("cross_entropy", (), 12, 18)],
        backward=True,
        need_dhidden=True,
    )
    grads = staged(slabs[0]) + staged(slabs[1])
    assert result.dhidden is not None
    for adapter, (start, end), grad in zip(adapters, ROWS, grads, strict=True):
        a, b = (m.clone().requires_grad_() for m in adapter.named_matrices["lm_head"])
        own = hidden[start:end].clone().requires_grad_()
        logits = F.linear(own, head.weight, head.bias) + adapter.scaling * (own @ a.T) @ b.T
        logp = torch.log_softmax(logits, -1).gather(1, targets[start:end, None])[:, 0]
        loss = -weights[start:end] * logp
        loss.sum().backward()
        close(result.logp[start:end], logp.detach())
        close(result.loss[start:end], loss.detach())
        for got, want in zip((result.dhidden[start:end], *grad["lm_head"]), (own.grad, a.grad, b.grad), strict=True):
            assert want is not None
            close(got, want)
