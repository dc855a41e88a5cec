"""Every error Mainspring raises, with its stable code.

    MainspringError
    ├── RequestError                the request was accepted; its future raises this
    │   ├── InvalidRequest          what was sent is wrong: fix it and submit again
    │   │   ├── PayloadInvalid          payload_invalid          not msgpack, truncated, or not the documented fields
    │   │   ├── TokenCountMismatch      token_count_mismatch     the header announced another number of tokens
    │   │   ├── EmptyBatch              empty_batch              no datum at all
    │   │   ├── EmptyDatum              empty_datum              a datum without a single token
    │   │   ├── LengthMismatch          length_mismatch          a loss input is not as long as its datum
    │   │   ├── SequenceTooLong         sequence_too_long        longer than the model's positions
    │   │   ├── TokenOutOfRange         token_out_of_range       a token id outside the vocabulary
    │   │   ├── NonFiniteInput          non_finite_input         NaN or infinity in a loss input
    │   │   ├── UnknownLoss             unknown_loss             no loss function of that name
    │   │   ├── MissingLossInput        missing_loss_input       the loss needs an input that is not there
    │   │   ├── UnknownLossInput        unknown_loss_input       an input that the loss does not know
    │   │   ├── InvalidLossConfig       invalid_loss_config      an unknown key or an unusable value
    │   │   ├── InvalidHyperparameter   invalid_hyperparameter   an optimizer or adapter setting out of range
    │   │   ├── UnknownOperation        unknown_operation        no operation of that name
    │   │   ├── CheckpointExists        checkpoint_exists        that name was saved before, and paths never change
    │   │   ├── CheckpointNotFound      checkpoint_not_found     this tenant has no checkpoint of that path
    │   │   ├── CheckpointExpired       checkpoint_expired       its time to live is over
    │   │   ├── CheckpointMismatch      checkpoint_mismatch      made by another base model, rank or set of flags
    │   │   └── NoOptimizerState        no_optimizer_state       the checkpoint holds weights only
    │   ├── PrecedingRequestFailed  preceding_request_failed     a forward_backward of this update failed: nothing was applied
    │   ├── NoGradient              no_gradient                  optim_step without a forward_backward before it
    │   ├── NonFiniteGradient       non_finite_gradient          the computation itself gave NaN or infinity
    │   ├── OutOfMemory             out_of_memory                the request alone does not fit the device
    │   ├── RequestCrashedWorker    request_crashed_worker       the request killed its worker twice
    │   ├── RequestCancelled        request_cancelled            cancelled by its own client before it started
    │   ├── StateLost               state_lost                   the job's weights are no longer on any worker
    │   ├── StorageFailed           storage_failed               writing or reading files failed
    │   ├── ResultExpired           result_expired               it was executed, but its result is no longer kept
    │   └── InternalError           internal_error               a fault of Mainspring itself: please report it
    ├── SubmitError                 the request was not accepted: nothing happened
    │   ├── BacklogFull             backlog_full                 the job has too many unfinished requests or bytes
    │   ├── PayloadTooLarge         payload_too_large            one request above the limit
    │   ├── SequenceConflict        sequence_conflict            this seq was accepted before with another body
    │   ├── SequenceGap             sequence_gap                 an earlier seq has not been accepted yet
    │   ├── HistoryDiverged         history_diverged             client and service remember different requests
    │   ├── WriterFenced            writer_fenced                another client has taken over this job
    │   ├── UnknownJob              unknown_job                  no such job
    │   ├── JobEnded                job_ended                    the job has been ended
    │   ├── JobExists               job_exists                   a job of that id belongs to another client
    │   ├── UnknownTenant           unknown_tenant               the tenant was never added to the pool
    │   ├── UnknownBaseModel        unknown_base_model           the pool serves another base model
    │   └── ServerFull              server_full                  Redis is out of memory
    └── ServiceError                the service itself
        ├── ServiceUnavailable      service_unavailable          Redis cannot be reached, or no clock or worker is there
        ├── ServiceClosed           service_closed               this client was closed
        ├── NotLeader               not_leader                   a clock without the lease
        ├── StaleBatch              stale_batch                  a batch that is no longer this worker's to commit
        ├── WorkerReplaced          worker_replaced              another process has registered under this worker's name
        ├── LibraryMissing          library_missing              the function library is not loaded: start a clock
        ├── LibraryMismatch         library_mismatch             the library loaded is of another version
        ├── ServerUnsupported       server_unsupported           not Redis >= 7.0 nor Valkey >= 8
        └── EvictionPolicyUnsafe    eviction_policy_unsafe       the server may evict keys: set maxmemory-policy noeviction

The codes travel on the wire and never change; `from_wire` turns one back into its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

MAX_MESSAGE_CHARS = 2000  # stored errors are bounded


class MainspringError(Exception):
    """Base of all Mainspring errors.

    Attributes:
        code: the stable machine-readable name of the kind of error.
        message: what was wrong and what to do, for a person.
        details: plain values that a program may want (datum, position, limit, …).
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, /, **details: Any) -> None:
        message = message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
        super().__init__(message)
        self.message = message
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        """The error as a plain map: `{"code", "message", "details"}`."""
        return {"code": self.code, "message": self.message, "details": self.details}

    def __reduce__(self) -> tuple[Any, ...]:  # keep `details` through pickle and copy
        return (_rebuild, (type(self), self.message, self.details))


def _rebuild(cls: type[MainspringError], message: str, details: dict[str, Any]) -> MainspringError:
    return cls(message, **details)


class RequestError(MainspringError):
    """The request was accepted, and failed. Raised by its future."""

    code = "request_error"


class InvalidRequest(RequestError):
    """What was sent is wrong. Nothing of the job changed but its poisoned gradient."""

    code = "invalid_request"


class SubmitError(MainspringError):
    """The request was not accepted; nothing happened."""

    code = "submit_error"


class ServiceError(MainspringError):
    """Something about the service itself, not about one request."""

    code = "service_error"


class PayloadInvalid(InvalidRequest):
    code = "payload_invalid"


class TokenCountMismatch(InvalidRequest):
    code = "token_count_mismatch"


class EmptyBatch(InvalidRequest):
    code = "empty_batch"


class EmptyDatum(InvalidRequest):
    code = "empty_datum"


class LengthMismatch(InvalidRequest):
    code = "length_mismatch"


class SequenceTooLong(InvalidRequest):
    code = "sequence_too_long"


class TokenOutOfRange(InvalidRequest):
    code = "token_out_of_range"


class NonFiniteInput(InvalidRequest):
    code = "non_finite_input"


class UnknownLoss(InvalidRequest):
    code = "unknown_loss"


class MissingLossInput(InvalidRequest):
    code = "missing_loss_input"


class UnknownLossInput(InvalidRequest):
    code = "unknown_loss_input"


class InvalidLossConfig(InvalidRequest):
    code = "invalid_loss_config"


class InvalidHyperparameter(InvalidRequest):
    code = "invalid_hyperparameter"


class UnknownOperation(InvalidRequest):
    code = "unknown_operation"


class CheckpointExists(InvalidRequest):
    code = "checkpoint_exists"


class CheckpointNotFound(InvalidRequest):
    code = "checkpoint_not_found"


class CheckpointExpired(InvalidRequest):
    code = "checkpoint_expired"


class CheckpointMismatch(InvalidRequest):
    code = "checkpoint_mismatch"


class NoOptimizerState(InvalidRequest):
    code = "no_optimizer_state"


class PrecedingRequestFailed(RequestError):
    code = "preceding_request_failed"


class NoGradient(RequestError):
    code = "no_gradient"


class NonFiniteGradient(RequestError):
    code = "non_finite_gradient"


class OutOfMemory(RequestError):
    code = "out_of_memory"


class RequestCrashedWorker(RequestError):
    code = "request_crashed_worker"


class RequestCancelled(RequestError):
    code = "request_cancelled"


class StateLost(RequestError):
    code = "state_lost"


class StorageFailed(RequestError):
    code = "storage_failed"


class ResultExpired(RequestError):
    code = "result_expired"


class InternalError(RequestError):
    code = "internal_error"


class BacklogFull(SubmitError):
    code = "backlog_full"


class PayloadTooLarge(SubmitError):
    code = "payload_too_large"


class SequenceConflict(SubmitError):
    code = "sequence_conflict"


class SequenceGap(SubmitError):
    code = "sequence_gap"


class HistoryDiverged(SubmitError):
    code = "history_diverged"


class WriterFenced(SubmitError):
    code = "writer_fenced"


class UnknownJob(SubmitError):
    code = "unknown_job"


class JobEnded(SubmitError):
    code = "job_ended"


class JobExists(SubmitError):
    code = "job_exists"


class UnknownTenant(SubmitError):
    code = "unknown_tenant"


class UnknownBaseModel(SubmitError):
    code = "unknown_base_model"


class ServerFull(SubmitError):
    code = "server_full"


class ServiceUnavailable(ServiceError):
    code = "service_unavailable"


class ServiceClosed(ServiceError):
    code = "service_closed"


class NotLeader(ServiceError):
    code = "not_leader"


class StaleBatch(ServiceError):
    code = "stale_batch"


class WorkerReplaced(ServiceError):
    code = "worker_replaced"


class LibraryMissing(ServiceError):
    code = "library_missing"


class LibraryMismatch(ServiceError):
    code = "library_mismatch"


class ServerUnsupported(ServiceError):
    code = "server_unsupported"


class EvictionPolicyUnsafe(ServiceError):
    code = "eviction_policy_unsafe"


def _tree(cls: type[MainspringError]) -> list[type[MainspringError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _tree(sub))]


BY_CODE: dict[str, type[MainspringError]] = {cls.code: cls for cls in _tree(MainspringError)}


def from_wire(error: Mapping[str, Any]) -> MainspringError:
    """The exception that `to_wire` described. A code from a newer version becomes a plain RequestError."""
    cls = BY_CODE.get(str(error.get("code")), RequestError)
    details = error.get("details")
    return cls(
        str(error.get("message", "no message")),
        **{str(k): v for k, v in (details.items() if isinstance(details, dict) else ())},
    )
