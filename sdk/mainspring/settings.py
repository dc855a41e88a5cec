"""Where the service is, and how patient a client is with it."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ClientSettings(BaseSettings):
    """Settings of a ServiceClient, read from the environment (`MAINSPRING_URL`, …) when one is made."""

    model_config = SettingsConfigDict(env_prefix="MAINSPRING_", extra="ignore", frozen=True)

    url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis or Valkey of the service: redis://, rediss://, unix://; mock:// needs none, see testing.md",
    )
    tenant: str = Field("default", description="who owns the jobs")
    pool: str = Field("main", description="which pool: one base model, its clock and its workers")
    connect_timeout_s: float = Field(30.0, ge=0, description="wait so long for Redis, a clock and a worker to be there")
    retry_timeout_s: float = Field(900.0, ge=0, description="bear an outage of Redis so long before a request fails")
    poll_interval_s: float = Field(1.0, gt=0, description="look for results that were not announced every so often")
    rollback_window_s: float = Field(
        2.0, ge=0, description="what a restart of Redis may take back (0: appendfsync always)"
    )
    max_connections: int = Field(8, ge=2, description="connections of one client, its subscription included")
