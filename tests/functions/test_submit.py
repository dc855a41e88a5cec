"""submit: one request after the other, each exactly once."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from mainspring_broker import functions, keys
from mainspring_broker.errors import (
    HistoryDiverged,
    JobEnded,
    PayloadTooLarge,
    SequenceConflict,
    UnknownJob,
    WriterFenced,
)
from tests.helpers import Job, Scene, wait_until


@pytest.fixture
def job(scene: Scene) -> Job:
    scene.register("w1")
    return scene.job("j1")


def limit(job: Job, **limits: int) -> None:
    job.scene.r.hset(keys.info(job.scene.pool), mapping=limits)


def test_an_accepted_request_is_in_the_stream_under_its_seq(job: Job) -> None:
    job.submit(("forward_backward", 7), payload=b"\x00body")
    [(entry, fields)] = job.scene.r.xrange(job.key + ":requests")
    assert entry == b"1-0"
    assert fields[b"payload"] == b"\x00body"
    assert (fields[b"op"], fields[b"tokens"]) == (b"forward_backward", b"7")
    assert fields[b"digest"].decode() == functions.request_digest("forward_backward", b"\x00body")
    assert fields[b"chain"].decode() == job.chain == job.field("chain")
    assert job.queue() == ["1 forward_backward 7"]
    assert (job.field("last_seq"), job.field("backlog_bytes")) == ("1", "5")


def test_seqs_are_contiguous_and_the_chain_grows_with_each(job: Job) -> None:
    job.update().update()
    assert job.stream() == [1, 2, 3, 4]
    chain = functions.chain_start("acme", "j1", "writer-of-j1")
    for seq in range(1, 5):
        chain = functions.chain_next(chain, job.digests[seq])
    assert job.field("chain") == chain


def test_the_first_request_makes_the_job_ready_and_wakes_the_clock_once(job: Job) -> None:
    job.update()
    assert job.scene.ready() == ["j1"]
    assert job.scene.r.lrange(keys.wake(job.scene.pool, "acme"), 0, -1) == [b"1"]


def test_nothing_pool_wide_is_written(job: Job) -> None:
    own = keys.tenant(job.scene.pool, "acme").encode()
    before = {k: v for k, v in job.scene.everything().items() if not k.startswith(own)}
    job.update()
    assert {k: v for k, v in job.scene.everything().items() if not k.startswith(own)} == before


def test_a_repeat_is_answered_and_not_appended(job: Job) -> None:
    start = job.chain
    job.update()
    before = job.scene.everything()
    head = job.call("forward_backward", 10, seq=1, chain=start)
    assert (head.status, head.last_seq, head.chain) == ("have", 2, job.chain)
    assert job.scene.everything() == before


def test_a_repeat_whose_body_has_been_trimmed_is_still_answered(job: Job) -> None:
    job.update()
    job.scene.tick()
    job.scene.commit()
    assert job.stream() == []
    head = job.call("forward_backward", 10, seq=1)
    assert (head.status, head.last_seq, head.done_seq) == ("have", 2, 2)


def test_another_body_under_an_accepted_seq_is_a_conflict(job: Job) -> None:
    job.update()
    before = job.scene.everything()
    with pytest.raises(SequenceConflict, match="request 1"):
        job.call("forward_backward", 10, payload=b"other", seq=1)
    assert job.scene.everything() == before


def test_a_gap_tells_where_to_go_on(job: Job) -> None:
    job.update()
    head = job.call("optim_step", seq=5)
    assert (head.status, head.last_seq, head.chain) == ("gap", 2, job.chain)
    assert job.stream() == [1, 2]


def test_a_sender_with_another_history_is_refused(job: Job) -> None:
    job.update()
    with pytest.raises(HistoryDiverged):
        job.call("optim_step", chain="0" * 40)
    assert job.stream() == [1, 2]


def test_a_fenced_writer_is_refused_even_for_what_it_sent_before(job: Job) -> None:
    job.update()
    for seq in (1, 3):
        with pytest.raises(WriterFenced):
            job.call("optim_step", seq=seq, writer="an-earlier-client")


def test_an_unknown_job_is_refused_and_leaves_nothing(job: Job) -> None:
    before = job.scene.everything()
    with pytest.raises(UnknownJob):
        job.call("optim_step", job="no-such-job")
    assert job.scene.everything() == before


def test_after_end_was_accepted_nothing_else_is(job: Job) -> None:
    job.update().submit("end")
    assert job.field("state") == "ending"
    with pytest.raises(JobEnded):
        job.call("optim_step")
    assert job.call("end", seq=3).status == "have"


def test_a_job_that_has_ended_still_answers_repeats(job: Job) -> None:
    job.submit("end")
    job.scene.tick()
    job.scene.commit()
    assert job.call("end", seq=1).status == "have"
    with pytest.raises(JobEnded):
        job.call("optim_step")


def test_a_job_whose_record_has_expired_is_unknown(job: Job) -> None:
    job.submit("end")
    job.scene.tick()
    job.scene.commit(result_ttl_ms=1)
    wait_until(lambda: not job.scene.r.exists(job.key), "the record of the ended job expires")
    with pytest.raises(UnknownJob):
        job.call("optim_step")


def test_a_backlog_is_full_by_count_until_something_is_done(job: Job) -> None:
    limit(job, max_backlog=2)
    job.update()
    head = job.call("forward_backward", 10)
    assert (head.status, head.last_seq) == ("full", 2)
    assert job.stream() == [1, 2]
    job.scene.tick()
    job.scene.commit()
    job.update()


def test_a_backlog_is_full_by_bytes(job: Job) -> None:
    limit(job, max_backlog_bytes=100)
    job.submit(("forward_backward", 5), payload=b"x" * 60)
    assert job.call("forward_backward", 5, b"x" * 41).status == "full"
    assert job.call("forward_backward", 5, b"x" * 40).status == "accepted"


def test_bytes_leave_the_backlog_with_the_commit(job: Job) -> None:
    limit(job, max_backlog_bytes=100)
    job.submit(("forward_backward", 5), payload=b"x" * 60).submit("optim_step", payload=b"y" * 3)
    job.scene.tick()
    job.submit(("forward_backward", 5), payload=b"x" * 20)
    job.scene.commit()
    assert job.field("backlog_bytes") == "20"


def test_an_empty_backlog_takes_a_request_larger_than_the_limit(job: Job) -> None:
    limit(job, max_backlog=0, max_backlog_bytes=10)
    job.submit(("forward_backward", 5), payload=b"x" * 60)
    assert job.call("optim_step").status == "full"


def test_a_payload_above_the_limit_is_refused(job: Job) -> None:
    limit(job, max_payload_bytes=10)
    with pytest.raises(PayloadTooLarge, match="smaller batches"):
        job.call("forward_backward", 5, b"x" * 11)
    job.submit(("forward_backward", 5), payload=b"x" * 10)


def test_a_request_behind_the_head_does_not_make_a_job_in_flight_ready(job: Job) -> None:
    job.update()
    job.scene.tick()
    job.update()
    assert job.scene.ready(worker="w1") == []
    assert job.scene.ready() == []


@pytest.mark.parametrize(
    "changed",
    [
        {"seq": 0}, {"seq": -1}, {"tokens": -5}, {"tokens": 10**10}, {"op": "two words"}, {"op": ""},
        {"op": "x" * 65}, {"digest": "d"}, {"digest": "d" * 1000}, {"digest": "é" * 20},
    ],
    ids=lambda changed: str(changed)[:30],
)  # fmt: skip
def test_what_the_clock_could_not_read_is_not_appended(job: Job, changed: dict[str, object]) -> None:
    before = job.scene.everything()
    with pytest.raises(ResponseError, match="INVALID"):
        job.call(**{"op": "forward_backward", "tokens": 1, **changed})  # type: ignore[arg-type]
    assert job.scene.everything() == before


def test_a_key_and_a_name_of_two_jobs_are_refused(job: Job) -> None:
    other = job.scene.job("j2")
    before = job.scene.everything()
    digest = functions.request_digest("init", b"")
    with pytest.raises(ResponseError, match="INVALID"):
        job.scene.r.fcall("ms_submit", 1, other.key, "acme", "j1", other.writer, 1, other.chain, "init", 0, digest, b"")  # type: ignore[arg-type]
    assert job.scene.everything() == before


def test_two_senders_of_one_writer_cannot_both_append_the_same_seq(job: Job) -> None:
    assert job.call("forward_backward", 5, b"one").status == "accepted"
    with pytest.raises(SequenceConflict):
        job.call("forward_backward", 5, b"two")
