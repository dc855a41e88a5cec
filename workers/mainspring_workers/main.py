"""Entry of a worker process."""

from __future__ import annotations

import logging
import os

import redis

from mainspring_broker.errors import MainspringError
from mainspring_broker.logs import configure_logging
from mainspring_broker.process import check_server, on_signal_stop, wait_for_server
from mainspring_workers.settings import WorkerSettings

log = logging.getLogger("mainspring.worker")


def run_worker(settings: WorkerSettings | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit status: 1 when the pool does not want it."""
    settings = settings or WorkerSettings()
    configure_logging(settings.log_level, settings.log_format)
    # Idle compute threads sleep instead of spinning: beside any other busy process, spinning makes a cycle many times
    # slower, because the thread that everybody waits for is the one that gets no core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from mainspring_workers.storage import open_storage

    try:
        storage = open_storage(settings.storage, create=True)
    except MainspringError as error:
        log.error("%s", error.message)
        return 1
    import torch  # late: libgomp reads the environment now, and a wrong setting was said before the slow import

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
    client = redis.Redis.from_url(settings.url, health_check_interval=30, socket_timeout=30)
    worker = Worker(settings, client, engine)
    stopping = False

    def stop() -> None:
        nonlocal stopping
        stopping = True
        worker.stop()

    on_signal_stop(stop)
    if settings.metrics_port:
        worker.metrics.serve(settings)
    try:
        if wait_for_server(client, settings.url, lambda: stopping):
            check_server(client)
            worker.run()
    except MainspringError as error:
        log.error("worker %s: %s [%s]", worker.name, error.message, error.code)
        return 1
    finally:
        worker.metrics.close()
        client.close()
    return 0
