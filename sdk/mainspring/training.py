"""One job, as its owner sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mainspring import custom_loss, encoding
from mainspring.futures import APIFuture, PendingCall, because_never_opened
from mainspring.recorder import Recorder
from mainspring.report import MAX_UPDATES, CycleReport, make_report
from mainspring.session import Session
from mainspring.submit import JobSender, Request
from mainspring.tokenizer import load_tokenizer
from mainspring.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsResponse,
    ServerCapabilities,
)
from mainspring_broker import wire
from mainspring_broker.errors import (
    InvalidHyperparameter,
    JobEnded,
    MainspringError,
    RequestError,
    ServiceClosed,
    StateLost,
    UnknownJob,
)

if TYPE_CHECKING:
    from mainspring.client import ServiceClient

T = TypeVar("T")


class TrainingClient:
    """One training job: a LoRA adapter with its optimizer. Made by the `create_…` methods of `ServiceClient`.

    Requests run in the order in which they were submitted. Each method returns once its request is durably in the job's
    queue (and waits while that is full); the result comes with the future. Submit `forward_backward` and `optim_step`
    before waiting for either, and both run in one clock cycle. The methods may be called from any thread.

    In a `with` or `async with` statement the job is ended on the way out.

    Attributes:
        job: the job's id.
        base_model: the name of the pool's base model.
        rank: of the adapter.
        seed: of the adapter's initial values.
        train_attn, train_mlp, train_unembed: which layers it adapts.
    """

    def __init__(
        self,
        service: ServiceClient,
        session: Session,
        sender: JobSender,
        found: ServerCapabilities,
        opening: wire.Init | wire.LoadState,
    ) -> None:
        self.job = sender.job
        self.base_model = found.base_model
        if isinstance(opening, wire.Init):
            self._describe(asdict(opening))
        self._service = service  # keeps the session open
        self._session = session
        self._sender = sender
        self._base_model_path = found.base_model_path
        self._limits = encoding.Limits(found.token_budget, found.max_payload_bytes)
        self._recorder = Recorder()
        self._opening = opening
        self._init: PendingCall[dict[str, Any]] | None = None
        self._ended = False

    # -- requests -----------------------------------------------------------------------------------------------------

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss, summed over all tokens, and add its gradient to the job's.

        Args:
            data: the batch. One that is larger than a cycle's budget runs in several parts, as one update.
            loss_fn: "cross_entropy", "importance_sampling", "ppo", "cispo" or "dro"; docs/losses.md says what each needs.
            loss_fn_config: settings of the loss function, e.g. {"clip_high_threshold": 1.3} of "ppo".

        Raises:
            PayloadInvalid: something in the data is not a flat row of numbers. Other faults of the data are found by the
                worker and raised by the future.
            SubmitError: the request was not accepted, nothing happened.
            ServiceError: the client was closed, or the service could not be reached for a long time.
        """
        return self._submitted(self._compute(data, loss_fn, loss_fn_config, backward=True))

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward`, without blocking the event loop. Cancelled before it was sent, it is not sent."""
        return await self._submitted_async(self._compute(data, loss_fn, loss_fn_config, backward=True))

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward`, without a gradient."""
        return self._submitted(self._compute(data, loss_fn, loss_fn_config, backward=False))

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward`, without blocking the event loop."""
        return await self._submitted_async(self._compute(data, loss_fn, loss_fn_config, backward=False))

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: custom_loss.LossFunction
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward`, with a loss of your own, which runs here. Needs torch (`pip install torch`).

        Runs `forward` and waits for it, calls `loss_fn`, and submits a `forward_backward` that has the same gradient; so it
        takes at least a cycle before it returns. Submit nothing else for this job from elsewhere meanwhile.

        Args:
            data: the batch; each datum with `target_tokens`, and whatever else `loss_fn` wants to find there.
            loss_fn: called as `loss_fn(data, logprobs)` with one float32 tensor [length] a datum, the log-probabilities of
                its targets (0 where a target is -100). Returns the loss, a scalar tensor, and a map of metrics. It may
                couple tokens and datums in any way. What it raises is raised here, and nothing is submitted.

        Returns:
            A future whose metrics are `loss_sum` (your loss), `loss_mean`, `token_count` and those of `loss_fn`.

        Raises:
            TypeError, ValueError: `loss_fn` returned no such pair, or a loss without a gradient.
            NonFiniteInput: the loss or its gradient is NaN or infinite.
            MainspringError: what `forward` and its future raise.
        """
        scored = self.forward(custom_loss.to_score(data), "cross_entropy").result()
        linear = custom_loss.linearize(data, scored, loss_fn)
        return self.forward_backward(linear.batch, "cross_entropy").map(linear.output)

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: custom_loss.LossFunction
    ) -> APIFuture[ForwardBackwardOutput]:
        """As `forward_backward_custom`, without blocking the event loop: `loss_fn` is called in a thread."""
        scored = await (await self.forward_async(custom_loss.to_score(data), "cross_entropy"))
        linear = await asyncio.to_thread(custom_loss.linearize, data, scored, loss_fn)
        return (await self.forward_backward_async(linear.batch, "cross_entropy")).map(linear.output)

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """Apply the gradient of all `forward_backward` since the last step, and clear it. Raises as they do."""
        return self._submitted(self._optim_step(adam_params))

    async def optim_step_async(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """As `optim_step`, without blocking the event loop."""
        return await self._submitted_async(self._optim_step(adam_params))

    def save_state(self, name: str, ttl_seconds: int | None = None) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer, without a pending gradient, under a name that the job has not used before.

        Args:
            name: 1 to 200 letters, digits, '.', '_', '-', the first a letter or digit.
            ttl_seconds: how long it is kept; for ever if None.
        """
        return self._submitted(self._save(wire.SaveState(name, ttl_seconds)))

    async def save_state_async(self, name: str, ttl_seconds: int | None = None) -> APIFuture[SaveWeightsResponse]:
        """As `save_state`, without blocking the event loop."""
        return await self._submitted_async(self._save(wire.SaveState(name, ttl_seconds)))

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> APIFuture[SaveWeightsResponse]:
        """Save the weights only. Arguments as `save_state`; a name may be used once for each of the two."""
        return self._submitted(self._save(wire.SaveWeights(name, ttl_seconds)))

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None
    ) -> APIFuture[SaveWeightsResponse]:
        """As `save_weights_for_sampler`, without blocking the event loop."""
        return await self._submitted_async(self._save(wire.SaveWeights(name, ttl_seconds)))

    def load_state(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """Go on from saved weights, with a new optimizer and no pending gradient.

        Args:
            path: as a save of this tenant has returned it, of any job with this rank and these layers on this base model.
        """
        return self._submitted(self._load(wire.LoadState(path)))

    async def load_state_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """As `load_state`, without blocking the event loop."""
        return await self._submitted_async(self._load(wire.LoadState(path)))

    def load_state_with_optimizer(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """As `load_state`, with the optimizer as it was saved. The path must be one of `save_state`."""
        return self._submitted(self._load(wire.LoadState(path, optimizer=True)))

    async def load_state_with_optimizer_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """As `load_state_with_optimizer`, without blocking the event loop."""
        return await self._submitted_async(self._load(wire.LoadState(path, optimizer=True)))

    def end(self) -> APIFuture[None]:
        """End the job, after everything submitted before: its place on the worker is freed."""
        return self._submitted(self._end())

    async def end_async(self) -> APIFuture[None]:
        """As `end`, without blocking the event loop."""
        return await self._submitted_async(self._end())

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer. Needs transformers (`pip install transformers`)."""
        return load_tokenizer(self.base_model, self._base_model_path)

    def cycle_report(self, updates: int = MAX_UPDATES) -> CycleReport:
        """How the last updates ran in clock cycles, where the time went, and in one sentence what to change.

        Asks nobody: it is made from what this client has seen of its own requests (the last 4096).

        Args:
            updates: how many of the last finished ones to look at.
        """
        return make_report(self._recorder.stories(), last=updates, token_budget=self._limits.tokens)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the job unless it has ended. Returns when that is submitted; futures may still be awaited."""
        if not self._ended:
            with suppress(JobEnded, UnknownJob, ServiceClosed):
                self.end()

    async def close_async(self) -> None:
        """As `close`, without blocking the event loop."""
        if not self._ended:
            with suppress(JobEnded, UnknownJob, ServiceClosed):
                await self.end_async()

    def __enter__(self) -> TrainingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(*() if error is None else (MainspringError,)):  # the first error is the one to see
            self.close()

    async def __aenter__(self) -> TrainingClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(*() if error is None else (MainspringError,)):
            await self.close_async()

    def __repr__(self) -> str:
        return f"TrainingClient(job={self.job!r}, base_model={self.base_model!r}, rank={self.rank})"

    # -- what a future asks for ---------------------------------------------------------------------------------------

    def check_may_block(self) -> None:
        """Raises RuntimeError in a done-callback."""
        self._session.check_may_block()

    def expect(self, call: PendingCall[Any]) -> None:
        """Somebody now waits for this call's result."""
        self._session.connection.expect(call.job, max(call.seqs))

    def start_cancel(self, call: PendingCall[Any]) -> Future[bool]:
        """Ask the service to skip a call's requests."""
        return self._session.start(lambda: self._session.cancel(self._sender, list(call.seqs)))

    # -- building and posting calls -----------------------------------------------------------------------------------

    def _open(self) -> PendingCall[dict[str, Any]]:
        self._init = self._post([self._opening], lambda parts: parts[0])
        session, sender = self._session, self._sender  # not self: a client that nobody holds closes itself

        def end_if_never_opened(opened: Future[dict[str, Any]]) -> None:
            error = opened.exception()
            if isinstance(error, RequestError):
                session.end_job(sender, because_never_opened(StateLost(""), error))

        self._init.outcome.add_done_callback(end_if_never_opened)
        return self._init

    def _describe(self, facts: Mapping[str, Any]) -> None:
        """Take note of what adapter this is."""
        self.rank, self.seed = int(facts["rank"]), int(facts["seed"])
        self.train_attn, self.train_mlp = bool(facts["train_attn"]), bool(facts["train_mlp"])
        self.train_unembed = bool(facts["train_unembed"])

    def _compute(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, Any] | None, *, backward: bool
    ) -> PendingCall[ForwardBackwardOutput]:
        whole = encoding.flatten(data, loss_fn, loss_fn_config or {}, backward=backward)
        return self._post(encoding.split(whole, self._limits), encoding.join_outputs)

    def _optim_step(self, adam_params: AdamParams) -> PendingCall[OptimStepResponse]:
        if not isinstance(adam_params, AdamParams):
            raise InvalidHyperparameter(f"optim_step takes AdamParams(learning_rate=…), got {adam_params!r:.100}")
        values = {name: float(value) for name, value in asdict(adam_params).items()}
        return self._post([wire.OptimStep(**values)], lambda parts: OptimStepResponse(parts[0]["metrics"]))

    def _save(self, operation: wire.SaveState | wire.SaveWeights) -> PendingCall[SaveWeightsResponse]:
        def join(parts: list[dict[str, Any]]) -> SaveWeightsResponse:
            return SaveWeightsResponse(parts[0]["path"], parts[0]["location"], parts[0]["size_bytes"])

        return self._post([operation], join)

    def _load(self, operation: wire.LoadState) -> PendingCall[LoadWeightsResponse]:
        return self._post([operation], lambda parts: LoadWeightsResponse(operation.path, parts[0]["step"]))

    def _end(self) -> PendingCall[None]:
        call: PendingCall[None] = self._post([wire.End()], lambda parts: None)
        self._ended = True
        return call

    def _post(self, operations: Sequence[wire.Operation], join: Callable[[list[dict[str, Any]]], T]) -> PendingCall[T]:
        """Queue a call. From here on its place in the job's order is fixed."""
        call = PendingCall(self.job, join, self._init)
        requests = [
            Request.of(call, wire.op_name(operation), wire.token_count(operation), wire.encode_operation(operation))
            for operation in operations
        ]
        self._session.post(self._sender, requests)
        self._recorder.add(call.stories)
        return call

    def _submitted(self, call: PendingCall[T]) -> APIFuture[T]:
        """Wait until the call is accepted."""
        try:
            self.check_may_block()
            call.accepted.result()
        except BaseException:  # a KeyboardInterrupt, for one
            self._withdraw(call)
            raise
        return APIFuture(self, call, call.outcome)

    async def _submitted_async(self, call: PendingCall[T]) -> APIFuture[T]:
        try:
            await asyncio.wrap_future(call.accepted)
        except asyncio.CancelledError:
            self._withdraw(call)
            raise
        return APIFuture(self, call, call.outcome)

    def _withdraw(self, call: PendingCall[Any]) -> None:
        with suppress(ServiceClosed):
            self._session.withdraw(self._sender, call)
