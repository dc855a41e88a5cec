"""What travels: the operations a client may request and their results, as typed values.

A batch of datums is sent flat: all tokens joined in one int32 tensor, each loss input in one tensor beside it, and the
datums' lengths. Nothing on the way turns a token into a Python integer.

These types check form only (is it the right kind of value). What the model allows (vocabulary, length, known losses)
is checked by the worker, the one place that knows the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainspring_broker.codec import pack, unpack
from mainspring_broker.errors import PayloadInvalid, UnknownOperation

LORA_ALPHA = 32.0  # fixed, so that a learning rate means the same at every rank; the scaling is alpha / rank


@dataclass(frozen=True, slots=True)
class Jagged:
    """One flat array that holds a row per datum."""

    values: NDArray[Any]  # [sum(lengths)]
    lengths: NDArray[np.int32]  # [N], one per datum


@dataclass(frozen=True, slots=True)
class Init:
    """Seq 1 of a job: a fresh adapter."""

    rank: int
    seed: int  # of the A matrices; recorded, so that a replay draws the same
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = LORA_ALPHA


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Loss and, unless `backward` is False, its gradient, which is added to the job's pending gradient."""

    loss_fn: str
    tokens: Jagged  # int32: the model's input
    inputs: Mapping[str, Jagged]  # by name, e.g. target_tokens (int), weights (float32)
    loss_config: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True

    @property
    def token_count(self) -> int:
        """Tokens that go through the model: what the clock's budget and fair share count."""
        return int(self.tokens.values.shape[0])


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One Adam step with decoupled weight decay on the pending gradient, which is then cleared."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled: weights shrink by learning_rate * weight_decay per step
    grad_clip_norm: float = 0.0  # global norm of this job's own gradient; 0 means no clipping


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write a checkpoint of weights and optimizer under a name, which then never changes."""

    name: str
    ttl_seconds: int | None = None  # from now on; None: kept for ever


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """As SaveState, weights only."""

    name: str
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class LoadState:
    """Go on from a checkpoint of the same tenant. As seq 1 of a job it opens it, with the checkpoint's rank and flags."""

    path: str  # mainspring://<job>/weights/<name>, or …/sampler_weights/… without optimizer
    optimizer: bool = False  # False: moments and step start anew


@dataclass(frozen=True, slots=True)
class End:
    """The last request of a job: its slot and its keys are freed."""


Operation = Init | LoadState | ForwardBackward | OptimStep | SaveState | SaveWeights | End

OPS: dict[str, type] = {
    "init": Init,
    "load_state": LoadState,
    "forward": ForwardBackward,
    "forward_backward": ForwardBackward,
    "optim_step": OptimStep,
    "save_state": SaveState,
    "save_weights": SaveWeights,
    "end": End,
}

# Order of the operations within a cycle: a cycle takes of a job what goes forward through these (lua/tick.lua has the same).
STAGE = {
    "init": 1,
    "load_state": 1,
    "forward": 2,
    "forward_backward": 2,
    "optim_step": 3,
    "save_state": 4,
    "save_weights": 4,
    "end": 5,
}


def op_name(operation: Operation) -> str:
    """The name under which the operation is queued."""
    if isinstance(operation, ForwardBackward):
        return "forward_backward" if operation.backward else "forward"
    return next(name for name, cls in OPS.items() if type(operation) is cls)


def token_count(operation: Operation) -> int:
    """Tokens the operation puts through the model (0 for all but forward and forward_backward)."""
    return operation.token_count if isinstance(operation, ForwardBackward) else 0


def encode_operation(operation: Operation) -> bytes:
    """The payload of a request."""
    if isinstance(operation, ForwardBackward):
        return pack(
            {
                "loss_fn": operation.loss_fn,
                "loss_config": dict(operation.loss_config),
                "tokens": _jagged_to_wire(operation.tokens),
                "inputs": {name: _jagged_to_wire(jagged) for name, jagged in operation.inputs.items()},
            }
        )
    return pack(asdict(operation))


def decode_operation(op: str, payload: bytes) -> Operation:
    """The operation of a payload.

    Raises:
        UnknownOperation: no operation is called `op`.
        PayloadInvalid: the payload is not msgpack or not that operation's fields.
    """
    cls = OPS.get(op)
    if cls is None:
        raise UnknownOperation(f"there is no operation {op!r}; known are {', '.join(OPS)}", op=op)
    body = unpack(payload)
    if not isinstance(body, dict):
        raise PayloadInvalid(f"the payload of {op} must be a map, got {type(body).__name__}")
    if cls is ForwardBackward:
        return _decode_forward_backward(op, body)
    return _decode_plain(cls, op, body)


def _jagged_to_wire(jagged: Jagged) -> dict[str, Any]:
    return {"values": jagged.values, "lengths": jagged.lengths}


def _decode_forward_backward(op: str, body: dict[str, Any]) -> ForwardBackward:
    _check_fields(op, body, required={"loss_fn", "tokens", "inputs"}, optional={"loss_config"})
    loss_config = body.get("loss_config", {})
    if not isinstance(body["loss_fn"], str):
        raise PayloadInvalid(f"{op}: loss_fn must be a string")
    if not isinstance(loss_config, dict) or not isinstance(body["inputs"], dict):
        raise PayloadInvalid(f"{op}: loss_config and inputs must be maps")
    tokens = _jagged_from_wire(op, "tokens", body["tokens"])
    if tokens.values.dtype.kind != "i":
        raise PayloadInvalid(f"{op}: tokens must be int32, got {tokens.values.dtype}")
    return ForwardBackward(
        loss_fn=body["loss_fn"],
        tokens=tokens,
        inputs={str(name): _jagged_from_wire(op, str(name), value) for name, value in body["inputs"].items()},
        loss_config=loss_config,
        backward=op == "forward_backward",
    )


def _jagged_from_wire(op: str, name: str, value: Any) -> Jagged:
    if not isinstance(value, dict) or value.keys() != {"values", "lengths"}:
        raise PayloadInvalid(f"{op}: {name} must be a map of values and lengths")
    values, lengths = value["values"], value["lengths"]
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise PayloadInvalid(f"{op}: the values of {name} must be a tensor with one dimension")
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind != "i":
        raise PayloadInvalid(f"{op}: the lengths of {name} must be an int32 tensor with one dimension")
    bad_length = len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > len(values))
    if bad_length or (len(lengths) and int(lengths.sum(dtype=np.int64)) != len(values)):
        raise PayloadInvalid(f"{op}: the lengths of {name} do not add up to its {len(values)} values")
    if not len(lengths) and len(values):
        raise PayloadInvalid(f"{op}: {name} has {len(values)} values but no lengths")
    return Jagged(values, lengths.astype(np.int32, copy=False))


def _decode_plain(cls: Any, op: str, body: dict[str, Any]) -> Operation:
    names = {name: spec.type for name, spec in cls.__dataclass_fields__.items()}
    required = {name for name, spec in cls.__dataclass_fields__.items() if spec.default is MISSING}
    _check_fields(op, body, required=required, optional=names.keys() - required)
    values: dict[str, Any] = {}
    for name, value in body.items():
        kind, _, optional = names[name].partition(" | ")
        if value is None and optional:
            values[name] = None
        elif kind == "float" and type(value) in (int, float):
            values[name] = float(value)
        elif (kind, type(value)) in (("int", int), ("bool", bool), ("str", str)):
            values[name] = value
        else:
            raise PayloadInvalid(f"{op}: {name} must be {kind}, got {type(value).__name__}")
    decoded: Operation = cls(**values)
    return decoded


def _check_fields(op: str, body: Mapping[str, Any], required: set[str], optional: Any) -> None:
    if missing := sorted(required - body.keys()):
        raise PayloadInvalid(f"{op}: missing {', '.join(missing)}")
    if unknown := sorted(str(name) for name in body.keys() - required - set(optional)):
        raise PayloadInvalid(f"{op}: unknown field {', '.join(unknown)[:200]}")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a result key holds."""

    result: dict[str, Any] | None  # of the operation; None when it failed
    error: dict[str, Any] | None  # code, message, details; None when it succeeded
    cycle: int  # the cycle it ran in
    queued_ms: float  # from acceptance to the start of its cycle, by the server's clock
    compute_ms: float  # from the start of the worker's batch to its end
    worker: str


def encode_envelope(envelope: Envelope) -> bytes:
    """The bytes of a result key."""
    return pack({name: getattr(envelope, name) for name in Envelope.__dataclass_fields__})


def decode_envelope(data: bytes) -> Envelope:
    """The envelope of a result key. Fields of a newer version are ignored.

    Raises:
        PayloadInvalid: not an envelope.
    """
    body = unpack(data)
    if not isinstance(body, dict) or not Envelope.__dataclass_fields__.keys() <= body.keys():
        raise PayloadInvalid("this is not a result envelope")
    return Envelope(**{name: body[name] for name in Envelope.__dataclass_fields__})
