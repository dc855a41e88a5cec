"""Which checkpoint is meant, and what it says of itself.

A user's path, mainspring://<job>/<kind>/<name>, does not name the tenant: it is looked up among those of who asks, so that
nobody can even name a checkpoint of somebody else.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from mainspring_broker.errors import CheckpointMismatch, PayloadInvalid, StorageFailed
from mainspring_broker.keys import NAME_PATTERN
from mainspring_broker.wire import Init

STATE, WEIGHTS = KINDS = ("weights", "sampler_weights")  # written by save_state, by save_weights
SCHEME = "mainspring://"
FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Place:
    """Which checkpoint, and whose."""

    tenant: str
    job: str
    kind: str  # STATE or WEIGHTS
    name: str

    @classmethod
    def of_path(cls, tenant: str, path: str) -> Place:
        """What `tenant` means by a path.

        Raises:
            PayloadInvalid: it is no path of a checkpoint. StorageFailed: the tenant is no name for a folder.
        """
        _check_folder_name(tenant)
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3:
            job, kind, name = parts
            if NAME_PATTERN.fullmatch(job) and kind in KINDS and NAME.fullmatch(name):
                return cls(tenant, job, kind, name)
        raise PayloadInvalid(
            f"{path[:300]!r} is no path of a checkpoint: {SCHEME}<job>/{STATE}/<name> or {SCHEME}<job>/{WEIGHTS}/<name>",
            field="path",
        )

    @classmethod
    def of_job(cls, tenant: str, job: str, kind: str, name: str) -> Place:
        """Where a job saves under `name`.

        Raises:
            PayloadInvalid: it is no name. StorageFailed: tenant or job is no name for a folder.
        """
        if not NAME.fullmatch(name):
            raise PayloadInvalid(
                f"{name[:100]!r} is no checkpoint name: 1 to 200 letters, digits, '.', '_', '-', the first a letter or digit",
                field="name",
                limit=200,
            )
        _check_folder_name(tenant)
        _check_folder_name(job)
        return cls(tenant, job, kind, name)

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.job}/{self.kind}/{self.name}"

    @property
    def folder(self) -> str:
        return f"{self.tenant}/{self.job}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """checkpoint.json."""

    kind: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    alpha: float
    seed: int  # of the values the adapter once began with
    step: int  # optimizer steps applied
    created: str  # ISO 8601, UTC, as all times here
    expires: str | None  # None: never
    request: str  # the job's chain at the request that saved it: tells a repetition from another save
    files: dict[str, dict[str, Any]]  # name → size in bytes, sha256
    format: int = FORMAT

    @property
    def init(self) -> Init:
        """What opens an adapter that this checkpoint fits."""
        return Init(self.rank, self.seed, self.train_attn, self.train_mlp, self.train_unembed, self.alpha)

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.fromisoformat(self.expires) <= now()

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(int(file["size"]) for file in self.files.values())

    def to_json(self) -> bytes:
        body = asdict(self)
        return (json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        body = json.loads(data)
        if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
            raise ValueError("its SHA-256 is not the one that was written")
        if body["format"] != FORMAT:
            raise ValueError(f"it is of format {body['format']!r}, this version reads {FORMAT}")
        return cls(**body)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _check_folder_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise StorageFailed(f"{name[:100]!r} is no name for a folder")


def check_fits(place: Place, manifest: Manifest, base_model: str, init: Init | None) -> None:
    """That a checkpoint fits this base model, and if `init` is given, the job that it opened.

    Raises:
        CheckpointMismatch: it says what is different, on both sides.
    """
    saved: dict[str, Any] = {"base_model": manifest.base_model}
    wanted: dict[str, Any] = {"base_model": base_model}
    if init is not None:
        for name in ("rank", "train_attn", "train_mlp", "train_unembed", "alpha"):
            saved[name], wanted[name] = getattr(manifest, name), getattr(init, name)
    different = [name for name in saved if saved[name] != wanted[name]]
    if different:
        said = ", ".join(f"{name} is {saved[name]!r} there and {wanted[name]!r} here" for name in different)
        raise CheckpointMismatch(f"{place.path} does not fit this job: {said}", checkpoint=saved, job=wanted)
