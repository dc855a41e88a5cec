"""Entry of a worker process."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

import redis

from mainspring_broker.errors import MainspringError
from mainspring_broker.logs import configure_logging
from mainspring_broker.process import check_server, on_signal_stop, wait_for_server
from mainspring_workers.settings import WorkerSettings

if TYPE_CHECKING:
    from mainspring_workers.loop import Worker

log = logging.getLogger("mainspring.worker")


def run_worker(settings: WorkerSettings | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit status: 1 when it and the pool do not fit together."""
    settings = settings or WorkerSettings()
    configure_logging(settings.log_level, settings.log_format)
    on_signal_stop(lambda: sys.exit(0))  # until it serves there is nothing to finish
    client = redis.Redis.from_url(settings.url, health_check_interval=30, socket_timeout=30)
    try:
        wait_for_server(client, settings.url, lambda: False)
        check_server(client)  # before the slow part: a wrong server is said at once
        worker = _make(settings, client)
        on_signal_stop(worker.stop)
        if settings.metrics_port:
            worker.metrics.serve(settings)
        try:
            worker.run()
        finally:
            worker.metrics.close()
    except MainspringError as error:
        log.error("this worker cannot serve: %s [%s]", error.message, error.code)
        return 1
    finally:
        client.close()
    return 0


def _make(settings: WorkerSettings, client: redis.Redis) -> Worker:
    """Load the base model. Raises StorageFailed, and what transformers raises for a model that is not there."""
    from mainspring_workers.storage import open_storage

    storage = open_storage(settings.storage, create=True)
    # Idle compute threads sleep instead of spinning: beside any other busy process, spinning makes a cycle many times
    # slower, because the thread that everybody waits for is the one that gets no core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch  # late: libgomp reads the environment now, and what is wrong was said before the slow import

    from mainspring_workers.base_model import BaseModel
    from mainspring_workers.engine import Engine
    from mainspring_workers.loop import Worker

    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = BaseModel.load(settings.base_model, device=device, dtype=settings.dtype)
    engine = Engine(
        model,
        storage=storage,
        micro_batch_tokens=settings.micro_batch_tokens,
        slots=settings.slots,
        deterministic_isolation=settings.deterministic_isolation,
    )
    return Worker(settings, client, engine)
