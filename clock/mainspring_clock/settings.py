"""Settings of a clock process: environment variables with the prefix MAINSPRING_, read when the process starts."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from mainspring_broker.logs import LogFormat


class ClockSettings(BaseSettings):
    """One clock. Every field is `MAINSPRING_<FIELD>` in the environment."""

    model_config = SettingsConfigDict(env_prefix="MAINSPRING_", extra="ignore")

    url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey of the pool")
    pool: str = Field("main", description="name of the pool")
    tenants: str = Field("default", description="tenants let in at the start, separated by commas: name or name=weight")
    token_budget: int = Field(8192, ge=1, description="tokens per cycle and worker; more waits for the next cycle")
    gather_ms: float = Field(5.0, ge=0, description="idle pool: how long to wait for more after a request arrived")
    gather_limit_ms: float = Field(25.0, ge=0, description="idle pool: the longest such wait, however much arrives")
    lease_ms: int = Field(5000, ge=100, description="a standby clock takes over when the leader is silent this long")
    worker_timeout_ms: int = Field(10000, ge=500, description="a worker without heartbeat this long is taken out")
    history_cycles: int = Field(4096, ge=1, description="finished cycles kept for `mainspring cycles`")
    max_backlog: int = Field(1024, ge=1, description="unfinished requests a job may have; more waits at the client")
    max_backlog_bytes: int = Field(256 * 2**20, ge=1, description="bytes of unfinished payloads a job may have")
    max_payload_bytes: int = Field(64 * 2**20, ge=1, description="largest single request")
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: LogFormat = Field("text", description="text for people, json: one object a line")
    metrics_port: int = Field(0, ge=0, le=65535, description="serve Prometheus metrics on this port; 0: not")
    metrics_host: str = Field("127.0.0.1", description="address to serve metrics on; 0.0.0.0: to everybody")
