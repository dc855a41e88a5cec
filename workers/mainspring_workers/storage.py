"""Where checkpoints lie: in a directory, or in whatever fsspec reaches by a URL (s3://bucket/prefix, gs://…, memory://…).

A store knows folders, each with a few files, the last of them the manifest. A folder exists when its manifest does, so
it is there whole or not at all, whatever dies in between:

- In a directory it is written under another name, synced to disk, and renamed.
- An object store has no rename. There the manifest is put last, and each single put is atomic.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fsspec.core import url_to_fs

from mainspring_broker.errors import StorageFailed

MANIFEST = "checkpoint.json"


class Storage(Protocol):
    """A store of folders. All paths are relative, with "/". Every method raises StorageFailed when the store does not work."""

    def put(self, folder: str, files: Iterable[tuple[str, bytes]]) -> bool:
        """Write a new folder, the manifest last. False: somebody else has written it meanwhile, nothing was changed.

        `files` may be a generator that makes one file after another. When it or the store fails, nothing is left.
        """

    def read(self, folder: str, name: str) -> bytes | None:
        """One file; None if it does not exist."""

    def folders(self, parent: str) -> list[str]:
        """Names of what lies in `parent`, sorted; some of it may be unfinished."""

    def remove(self, folder: str) -> None:
        """Remove a folder, the manifest first. It need not be there."""

    def location(self, folder: str) -> str:
        """Where the folder is, for people and for other programs: a path or a URL."""


def open_storage(url: str, *, create: bool = False) -> Storage:
    """The store of a directory or URL. `create`: make the directory, if it is one and is not there.

    Raises:
        StorageFailed: no such kind of store, or its driver is not installed, or the directory cannot be made.
    """
    scheme, separator, path = url.partition("://")
    if separator and scheme not in ("file", "local"):
        return ObjectStore(url)
    root = Path(path if separator else url).absolute()
    if create:
        with _told(f"the storage folder {root}"):
            root.mkdir(parents=True, exist_ok=True)
    return Directory(root)


class Directory:
    """A folder of the file system, local or shared."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, folder: str, files: Iterable[tuple[str, bytes]]) -> bool:
        final = self._root / folder
        temporary = _hidden(final)
        with _told(f"writing {final}"):
            self._make(final.parent)
            for abandoned in final.parent.glob(f".{final.name}~*"):
                _discard(abandoned, final)
            try:
                temporary.mkdir()
                for name, data in files:
                    _write(temporary / name, data)
                _sync(temporary)
                return self._appear(temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _appear(self, temporary: Path, final: Path) -> bool:
        try:
            os.rename(temporary, final)
        except OSError:
            if final.exists():
                return False
            raise
        try:
            _sync(final.parent)
        except OSError:
            os.rename(final, temporary)
            raise
        return True

    def _make(self, folder: Path) -> None:
        """Make a folder durably, but not the root: that it is gone is a fault, a disk that is not mounted for one."""
        self._check()
        path = self._root
        for part in folder.relative_to(self._root).parts:
            path = path / part
            with suppress(FileExistsError):
                path.mkdir()
                _sync(path.parent)

    def _check(self) -> None:
        if not self._root.is_dir():
            raise FileNotFoundError("the storage folder is not there")

    def read(self, folder: str, name: str) -> bytes | None:
        path = self._root / folder / name
        with _told(f"reading {path}"):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                self._check()
                return None

    def folders(self, parent: str) -> list[str]:
        path = self._root / parent
        with _told(f"reading {path}"):
            self._check()
            return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def remove(self, folder: str) -> None:
        final = self._root / folder
        with _told(f"removing {final}"):
            _discard(final, final)

    def location(self, folder: str) -> str:
        return str(self._root / folder)


class ObjectStore:
    """A store that fsspec has a driver for."""

    def __init__(self, url: str) -> None:
        # Drivers have errors of their own: not installed, no credentials, no such host.
        with _told(f"the storage {url}", Exception):
            # Another process writes there too, so that a remembered listing would be wrong.
            fs, root = url_to_fs(url, use_listings_cache=False)
        self._fs: Any = fs
        self._root: str = root.rstrip("/")

    def put(self, folder: str, files: Iterable[tuple[str, bytes]]) -> bool:
        begun: list[str] = []
        try:
            for name, data in files:
                path = self._path(folder, name)
                begun.append(path)
                with _told(f"writing {path}", Exception):
                    self._fs.pipe_file(path, data)
        except BaseException:
            self._clear(folder, begun)
            raise
        return True

    def _clear(self, folder: str, paths: list[str]) -> None:
        """Remove files of a failed put as far as possible: without the manifest they are nothing anyway.

        A put whose answer was lost may have brought the manifest there. Then the folder is whole, and stays.
        """
        with suppress(StorageFailed):
            if self.read(folder, MANIFEST) is None:
                for path in paths:
                    with suppress(Exception):
                        self._fs.rm_file(path)

    def read(self, folder: str, name: str) -> bytes | None:
        path = self._path(folder, name)
        with _told(f"reading {path}", Exception):
            try:
                data: bytes = self._fs.cat_file(path)
            except FileNotFoundError:
                return None
            return data

    def folders(self, parent: str) -> list[str]:
        path = self._path(parent)
        with _told(f"reading {path}", Exception):
            try:
                names = [entry["name"] for entry in self._fs.ls(path, detail=True)]
            except FileNotFoundError:
                return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in names)

    def remove(self, folder: str) -> None:
        path = self._path(folder)
        with _told(f"removing {path}", Exception), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(folder, MANIFEST))
            self._fs.rm(path, recursive=True)

    def location(self, folder: str) -> str:
        return str(self._fs.unstrip_protocol(self._path(folder)))

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


@contextmanager
def _told(what: str, errors: type[Exception] = OSError) -> Iterator[None]:
    """`errors` in here become a StorageFailed that names `what`."""
    try:
        yield
    except errors as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise StorageFailed(f"{what}: {reason}") from error


def _hidden(final: Path) -> Path:
    """A new name beside `final`. "~" is in no name, so it is never taken for a folder, and the next put finds it."""
    return final.parent / f".{final.name}~{secrets.token_hex(6)}"


def _discard(folder: Path, final: Path) -> None:
    """Remove a folder. It is renamed first: gone at once, and if somebody else still works in it, one of the two fails."""
    going = _hidden(final)
    with suppress(FileNotFoundError):
        os.rename(folder, going)
        shutil.rmtree(going, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
