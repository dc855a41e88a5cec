"""Each bad request is refused alone, with a typed error, while seven good neighbours in the same cycles notice nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

import mainspring as trio
from mainspring_broker import functions, keys
from mainspring_broker.wire import decode_envelope, encode_operation
from tests.helpers import wait_until_async
from tests.integration.training import (
    BASE_MODEL,
    MINE,
    NEIGHBOURS,
    TOLERANCE,
    VOCAB,
    compare,
    oracle_of,
    train,
    weights,
)
from tests.service import Service
from tests.tiny import batch as wire_batch

RUNS = count()
GOOD = trio.Datum(trio.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})


def datum(tokens: Any = (1, 2, 3), **inputs: Any) -> trio.Datum:
    return trio.Datum(trio.ModelInput.from_ints(list(tokens)), {"target_tokens": [2, 3, 4], **inputs})


BAD: dict[str, tuple[type[trio.MainspringError], Callable[[], Any]]] = {
    "token id above the vocabulary": (trio.TokenOutOfRange, lambda: [GOOD, datum((1, VOCAB, 3))]),
    "negative token id": (trio.TokenOutOfRange, lambda: [GOOD, datum((1, -1, 3))]),
    "target above the vocabulary": (trio.TokenOutOfRange, lambda: [GOOD, datum(target_tokens=[2, VOCAB, 4])]),
    "weights of another length": (trio.LengthMismatch, lambda: [GOOD, datum(weights=[1.0, 1.0])]),
    "targets of another length": (trio.LengthMismatch, lambda: [GOOD, datum(target_tokens=[2, 3])]),
    "no targets": (trio.MissingLossInput, lambda: [trio.Datum(trio.ModelInput.from_ints([1, 2]), {})]),
    "an input nobody knows": (trio.UnknownLossInput, lambda: [datum(mask=[1.0, 1.0, 1.0])]),
    "a weight that is NaN": (trio.NonFiniteInput, lambda: [GOOD, datum(weights=[1.0, float("nan"), 1.0])]),
    "an infinite weight": (trio.NonFiniteInput, lambda: [datum(weights=[1.0, float("inf"), 1.0])]),
    "an empty batch": (trio.EmptyBatch, list),
    "an empty datum": (
        trio.EmptyDatum,
        lambda: [GOOD, trio.Datum(trio.ModelInput.from_ints([]), {"target_tokens": []})],
    ),
    "longer than the model": (
        trio.SequenceTooLong,
        lambda: [trio.Datum(trio.ModelInput.from_ints([1] * 600), {"target_tokens": [1] * 600})],
    ),
}


@pytest.fixture
async def victim(client: trio.ServiceClient) -> Any:
    async with await client.create_lora_training_client_async(BASE_MODEL, rank=8, seed=9) as created:
        yield created


async def refusal(future: Any) -> trio.MainspringError:
    with pytest.raises(trio.MainspringError) as caught:
        await future
    return caught.value


@pytest.mark.parametrize("name", BAD)
async def test_bad_data_is_refused_by_name_and_the_next_update_is_clean(victim: trio.TrainingClient, name: str) -> None:
    kind, make = BAD[name]
    trained = await victim.forward_backward_async(make(), "cross_entropy")
    stepped = await victim.optim_step_async(trio.AdamParams())
    assert type(await refusal(trained)) is kind
    failure = await refusal(stepped)
    assert isinstance(failure, trio.PrecedingRequestFailed)
    assert failure.details["cause"] == kind.code

    await (await victim.forward_backward_async([GOOD], "cross_entropy"))
    clean = await (await victim.optim_step_async(trio.AdamParams()))
    assert clean.metrics["step"] == 1  # the failed update was no step


async def test_an_unknown_loss_and_an_unknown_base_model(
    client: trio.ServiceClient, victim: trio.TrainingClient
) -> None:
    assert isinstance(await refusal(await victim.forward_backward_async([GOOD], "hinge")), trio.UnknownLoss)
    config = await victim.forward_backward_async([GOOD], "cross_entropy", {"clip": 1.0})
    assert isinstance(await refusal(config), trio.InvalidLossConfig)
    with pytest.raises(trio.UnknownBaseModel, match=BASE_MODEL):
        await client.create_lora_training_client_async("another-model")


async def test_a_message_says_which_datum_which_position_and_what_is_allowed(victim: trio.TrainingClient) -> None:
    error = await refusal(await victim.forward_backward_async([GOOD, datum((1, 2, VOCAB + 7))], "cross_entropy"))
    assert error.details["datum"] == 1
    assert error.details["position"] == 2
    assert str(VOCAB + 7) in error.message
    assert str(VOCAB - 1) in error.message or str(VOCAB) in error.message


class RawJob:
    """A client that does not use the SDK: it sends whatever bytes it likes."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name
        self.common: dict[str, Any] = {"pool": service.pool, "tenant": "default", "job": name, "writer": "raw"}
        head = functions.run(service.redis, functions.create_job(**self.common, base_model=BASE_MODEL, rank=4, spec={}))
        self.seq, self.chain = 0, head.chain

    def send(self, op: str, payload: bytes, tokens: int = 0) -> int:
        digest = functions.request_digest(op, payload)
        call = functions.submit(
            **self.common, seq=self.seq + 1, chain=self.chain, op=op, tokens=tokens, digest=digest, payload=payload
        )
        reply = functions.run(self.service.redis, call)
        self.seq, self.chain = reply.last_seq, reply.chain
        return self.seq

    async def error(self, seq: int) -> str:
        key = keys.result(self.service.pool, "default", self.name, seq)
        data = await wait_until_async(lambda: self.service.redis.get(key), f"result {seq}")
        envelope = decode_envelope(data)
        return "ok" if envelope.error is None else envelope.error["code"]


async def test_garbage_from_a_client_of_another_make(service: Service, client: trio.ServiceClient) -> None:
    """Seven jobs train beside a job that sends nonsense in every cycle; each equals its oracle in the end."""
    prefix = f"garbage{next(RUNS)}"
    recipes = [MINE, *NEIGHBOURS[:6]]
    jobs = [await recipe.create(client, prefix) for recipe in recipes]
    starts = [await weights(service, job, "start") for job in jobs]
    raw = RawJob(service, f"{prefix}-raw")
    good = encode_operation(wire_batch(MINE.datums(0)))
    tokens = sum(MINE.lengths)
    nonsense = [
        ("forward_backward", b"", 0, "payload_invalid"),
        ("forward_backward", b"\xc1 this is not msgpack", 0, "payload_invalid"),
        ("forward_backward", good[:-7], tokens, "payload_invalid"),
        ("forward_backward", good, tokens - 1, "token_count_mismatch"),
        ("forward_backward", good, 10_000_000, "token_count_mismatch"),
        ("dance", good, 0, "unknown_operation"),
        ("optim_step", b"\x81\xa4rank\x01", 0, "payload_invalid"),
        ("save_weights", b"\x81\xa4name\xa5../..", 0, "invalid_request"),
        ("init", b"\x82\xa4rank\xce\x7f\xff\xff\xff\xa4seed\x01", 0, "invalid_hyperparameter"),
    ]

    async def annoy() -> list[tuple[str, str, str]]:
        start = raw.send("init", b"\x82\xa4rank\x04\xa4seed\x01")
        assert await raw.error(start) == "ok"
        answers = []
        for op, payload, announced, expected in nonsense:
            answers.append((op, expected, await raw.error(raw.send(op, payload, announced))))
        return answers

    answers, *said = await asyncio.gather(annoy(), *(train(r, j, 20) for r, j in zip(recipes, jobs, strict=True)))
    for op, expected, found in answers:
        assert found == expected or (expected == "invalid_request" and found != "ok"), (op, expected, found)
    for recipe, job, start, each in zip(recipes, jobs, starts, said, strict=True):
        oracle = oracle_of(recipe, start)
        compare(recipe, oracle, each)
        assert oracle.difference(await weights(service, job, "end")) <= TOLERANCE, recipe.name
        await (await job.end_async())
    assert await raw.error(raw.send("end", b"\x80")) == "ok"


async def test_outputs_come_in_datum_order_and_datum_length(victim: trio.TrainingClient) -> None:
    rng = np.random.default_rng(3)
    lengths = [31, 4, 4, 90, 1, 17, 4]
    rows = [rng.integers(0, VOCAB, length + 1) for length in lengths]
    data = [trio.Datum(trio.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]
    together = await (await victim.forward_async(data, "cross_entropy"))
    assert [len(row["logprobs"]) for row in together.loss_fn_outputs] == lengths
    for row, each in zip(data, together.loss_fn_outputs, strict=True):
        alone = await (await victim.forward_async([row], "cross_entropy"))
        np.testing.assert_allclose(each["logprobs"].numpy(), alone.loss_fn_outputs[0]["logprobs"].numpy(), atol=1e-4)
    total = -sum(row["logprobs"].numpy().sum() for row in together.loss_fn_outputs)
    assert together.metrics["loss_sum"] == pytest.approx(total, rel=1e-4)
    assert together.metrics["token_count"] == sum(lengths)
    assert together.metrics["loss_mean"] == pytest.approx(total / sum(lengths), rel=1e-4)
