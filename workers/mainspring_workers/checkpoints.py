"""What a checkpoint is: an adapter in PEFT's format, perhaps its optimizer, and a manifest, in a folder of the storage.

    <tenant>/<job>/weights/<name>/           by save_state: weights and optimizer
    <tenant>/<job>/sampler_weights/<name>/   by save_weights: weights only
        adapter_config.json  adapter_model.safetensors  optimizer.safetensors   see peft_format.py
        checkpoint.json                                                         the manifest; without it, there is nothing

A saved one never changes. The pending gradient is not part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from mainspring_broker.errors import (
    CheckpointExists,
    CheckpointExpired,
    CheckpointNotFound,
    NoOptimizerState,
    PayloadInvalid,
    StorageFailed,
)
from mainspring_workers import peft_format
from mainspring_workers.adapters import Adapter
from mainspring_workers.manifest import KINDS, NAME, STATE, Manifest, Place, now
from mainspring_workers.peft_format import CONFIG_FILE, OPTIMIZER_FILE, WEIGHTS_FILE, Matrices, OptimizerState
from mainspring_workers.storage import MANIFEST, Storage

T = TypeVar("T")

MAX_TTL_SECONDS = 10 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint's content, whole and verified."""

    manifest: Manifest
    weights: Matrices
    optimizer: OptimizerState | None  # None: not asked for

    def into(self, adapter: Adapter) -> None:
        """Make the adapter what was saved; without optimizer, moments and step begin anew. Its pending gradient goes.

        Raises:
            ValueError: the matrices do not fit the adapter, which was not changed.
        """
        rows = [adapter.layout.row(self.weights)]
        if self.optimizer is not None:
            rows += [adapter.layout.row(self.optimizer.exp_avg), adapter.layout.row(self.optimizer.exp_avg_sq)]
        adapter.clear_gradient()
        adapter.weights.copy_(rows[0])
        if self.optimizer is None:
            adapter.exp_avg.zero_()
            adapter.exp_avg_sq.zero_()
            adapter.step.zero_()
        else:
            adapter.exp_avg.copy_(rows[1])
            adapter.exp_avg_sq.copy_(rows[2])
            adapter.step.copy_(self.optimizer.step)


class Checkpoints:
    """The checkpoints in a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def location(self, place: Place) -> str:
        """Where its folder is, for people."""
        return self._storage.location(place.folder)

    def save(
        self, adapter: Adapter, place: Place, *, base_model: str, base_path: str, request: str, ttl_seconds: int | None
    ) -> Manifest:
        """Write the adapter, and its optimizer if the kind is STATE. It appears whole or not at all.

        The same request may come again, after a crash that it did not see the end of: then what it saved is the answer.

        Args:
            base_path: what PEFT shall find the base model under.
            request: the job's chain at this request.

        Raises:
            PayloadInvalid: the time to live is out of range.
            CheckpointExists: another request has saved this name, and it has not expired.
            StorageFailed: the disk is full, … Nothing is left of the attempt.
        """
        if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
            message = f"ttl_seconds is {ttl_seconds}; allowed is 1 to {MAX_TTL_SECONDS}, or None to keep it for ever"
            raise PayloadInvalid(message, field="ttl_seconds", limit=MAX_TTL_SECONDS)
        present = self.find(place)
        if present is None or present.expired:
            if present is not None:
                self._storage.remove(place.folder)
            manifest = _describe(adapter, place.kind, base_model, request, ttl_seconds)
            if self._storage.put(place.folder, _files(adapter, manifest, base_path)):
                return manifest
            present = self.find(place)  # somebody was faster
        if present is None:
            raise StorageFailed(f"{self.location(place)} is in the way: it is no checkpoint")
        if request and present.request == request:
            return present
        raise CheckpointExists(f"{place.path} was saved before, and a saved one never changes: use another name")

    def saved_by(self, place: Place, request: str) -> Manifest | None:
        """What this very request has saved before, if it has."""
        present = self.find(place)
        return present if present and present.request == request and request and not present.expired else None

    def load(self, place: Place, *, optimizer: bool) -> Loaded:
        """Read a checkpoint and verify it.

        Raises:
            CheckpointNotFound, CheckpointExpired: there is none, or no longer.
            NoOptimizerState: `optimizer` is asked for, and it has none.
            StorageFailed: a file of it is damaged or cannot be read.
        """
        manifest = self.find(place)
        if manifest is None:
            raise CheckpointNotFound(f"there is no checkpoint {place.path}: nothing of yours was saved under this path")
        if manifest.expired:
            raise CheckpointExpired(f"{place.path} was kept until {manifest.expires}", expired=manifest.expires)
        if optimizer and OPTIMIZER_FILE not in manifest.files:
            message = f"{place.path} has no optimizer state: load its weights only, or what save_state has saved"
            raise NoOptimizerState(message)
        self._read(place, manifest, CONFIG_FILE, bytes)
        weights = self._read(place, manifest, WEIGHTS_FILE, peft_format.read_weights)
        state = self._read(place, manifest, OPTIMIZER_FILE, peft_format.read_optimizer) if optimizer else None
        return Loaded(manifest, weights, state)

    def find(self, place: Place) -> Manifest | None:
        """The manifest; None if there is no such checkpoint. An expired one is found, too."""
        data = self._storage.read(place.folder, MANIFEST)
        if data is None:
            return None
        try:
            return Manifest.from_json(data)
        except ValueError as error:
            raise _damaged(place, MANIFEST, str(error)) from None

    def list_checkpoints(self, tenant: str, job: str) -> list[tuple[Place, Manifest]]:
        """All checkpoints of a job by kind and name, expired ones too."""
        names = [(kind, name) for kind in KINDS for name in self._storage.folders(f"{tenant}/{job}/{kind}")]
        places = [Place(tenant, job, kind, name) for kind, name in names if NAME.fullmatch(name)]
        return [(place, manifest) for place in places if (manifest := self.find(place)) is not None]

    def _read(self, place: Place, manifest: Manifest, name: str, parse: Callable[[bytes], T]) -> T:
        """One file, verified and parsed."""
        data, written = self._storage.read(place.folder, name), manifest.files[name]
        if data is None:
            raise _damaged(place, name, "it is missing")
        if len(data) != written["size"]:
            raise _damaged(place, name, f"it has {len(data)} bytes, {written['size']} were written")
        if hashlib.sha256(data).hexdigest() != written["sha256"]:
            raise _damaged(place, name, "its SHA-256 is not the one that was written")
        try:
            return parse(data)
        except ValueError as error:
            raise _damaged(place, name, str(error)) from None


def _damaged(place: Place, name: str, why: str) -> StorageFailed:
    return StorageFailed(f"{place.path} is damaged: {name}: {why}", file=name)


def _describe(adapter: Adapter, kind: str, base_model: str, request: str, ttl_seconds: int | None) -> Manifest:
    init, created = adapter.init, now()
    return Manifest(
        kind=kind,
        base_model=base_model,
        rank=init.rank,
        train_attn=init.train_attn,
        train_mlp=init.train_mlp,
        train_unembed=init.train_unembed,
        alpha=init.alpha,
        seed=init.seed,
        step=int(adapter.step.item()),
        created=created.isoformat(timespec="milliseconds"),
        expires=None if ttl_seconds is None else (created + timedelta(seconds=ttl_seconds)).isoformat(),
        request=request,
        files={},
    )


def _files(adapter: Adapter, manifest: Manifest, base_path: str) -> Iterator[tuple[str, bytes]]:
    """The files one after another, so that one at a time is in memory; each is noted in the manifest, which comes last."""
    made: list[tuple[str, Callable[[], bytes]]] = [
        (CONFIG_FILE, lambda: peft_format.config_bytes(adapter, base_path)),
        (WEIGHTS_FILE, lambda: peft_format.weights_bytes(adapter)),
    ]
    if manifest.kind == STATE:
        made.append((OPTIMIZER_FILE, lambda: peft_format.optimizer_bytes(adapter)))
    for name, make in made:
        data = make()
        manifest.files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        yield name, data
    yield MANIFEST, manifest.to_json()
