"""Settings of a worker process: environment variables with the prefix MAINSPRING_, read when the process starts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from mainspring_broker.logs import LogFormat


class WorkerSettings(BaseSettings):
    """One worker. Every field is `MAINSPRING_<FIELD>` in the environment."""

    model_config = SettingsConfigDict(env_prefix="MAINSPRING_", extra="ignore")

    url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey of the pool")
    pool: str = Field("main", description="name of the pool")
    worker: str = Field("", description="this worker's name; empty: made from the host name and a random part")
    base_model: str = Field("mainspring-tiny", description="a shipped name, a folder, or a Hugging Face id")
    device: str = Field("auto", description="cpu, cuda, cuda:1, …; auto: CUDA when there is a device")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the frozen base; adapters are float32")
    storage: str = Field("mainspring-data/adapters", description="where checkpoints go: a folder, or a URL for fsspec")
    slots: int = Field(64, ge=1, description="jobs this worker holds at most")
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0: one for each core")
    micro_batch_tokens: int = Field(1024, ge=1, description="tokens that go through the model at a time")
    deterministic_isolation: bool = Field(
        False, description="one job per micro-batch: slower, but a job's bits never depend on its neighbours"
    )
    result_ttl_s: int = Field(24 * 3600, ge=1, description="how long a result is kept after its completion")
    heartbeat_ms: int = Field(1000, ge=50, description="pause between two signs of life")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: LogFormat = Field("text", description="text for people, json: one object a line")
    metrics_port: int = Field(0, ge=0, le=65535, description="serve Prometheus metrics on this port; 0: not")
    metrics_host: str = Field("127.0.0.1", description="address to serve metrics on; 0.0.0.0: to everybody")
