"""A folder is written whole or not at all: full disks, failing stores, two writers, and kill -9 between any two steps."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from mainspring_broker.errors import StorageFailed
from mainspring_broker.wire import Init, LoadState, SaveState
from mainspring_workers import storage
from mainspring_workers.base_model import BaseModel
from mainspring_workers.checkpoints import Checkpoints
from mainspring_workers.storage import Directory, ObjectStore, Storage, open_storage
from tests.tiny import Driver, batch, optim, random_datums, tiny_base

FOLDER = "t/job/weights/x"
FILES = [("a", b"first"), ("b", b"second" * 1000), ("checkpoint.json", b"{}")]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base()


@pytest.fixture(params=["directory", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield open_storage(str(tmp_path) if request.param == "directory" else "memory://bucket/prefix")
    MemoryFileSystem.store.clear()


def trained(base: BaseModel, url: str | Path) -> Driver:
    driver = Driver(base, url)
    driver.good(("t/job", Init(rank=8, seed=1)))
    driver.good(("t/job", batch(random_datums(1, [9, 4]))), ("t/job", optim(5e-2)))
    return driver


# -- what a store does ------------------------------------------------------------------------------------------------


def test_what_was_put_is_read_listed_and_removed(store: Storage) -> None:
    assert store.read(FOLDER, "a") is None
    assert store.folders("t/job/weights") == []
    store.remove(FOLDER)
    assert store.put(FOLDER, iter(FILES))
    assert [store.read(FOLDER, name) for name, _ in FILES] == [data for _, data in FILES]
    assert store.read(FOLDER, "c") is None
    assert store.put("t/job/weights/y", FILES)
    assert store.folders("t/job/weights") == ["x", "y"]
    store.remove(FOLDER)
    assert store.read(FOLDER, "checkpoint.json") is None
    assert store.folders("t/job/weights") == ["y"]
    assert store.put(FOLDER, FILES)


def test_locations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("data/x").location(FOLDER) == f"{tmp_path}/data/x/{FOLDER}"
    assert open_storage(f"file://{tmp_path}").location(FOLDER) == f"{tmp_path}/{FOLDER}"
    assert open_storage("memory://bucket/prefix/").location(FOLDER) == f"memory:///bucket/prefix/{FOLDER}"


def test_a_folder_is_made_only_when_the_worker_starts(tmp_path: Path) -> None:
    open_storage(str(tmp_path / "a"))
    open_storage(f"file://{tmp_path}/b/c", create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("url", ["nonsense://bucket", "file:///dev/null/x"])
def test_a_storage_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(StorageFailed, match=r"nonsense://bucket|/dev/null/x"):
        open_storage(url, create=True)


def test_a_writer_that_is_overtaken_fails(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))

    def slow() -> Iterator[tuple[str, bytes]]:
        yield "a", b"slow"
        assert store.put(FOLDER, FILES)
        yield "checkpoint.json", b"slow"

    with pytest.raises(StorageFailed):
        store.put(FOLDER, slow())
    assert store.read(FOLDER, "a") == b"first"
    assert store.folders("t/job/weights") == ["x"]


def test_of_two_writers_at_once_one_at_most_succeeds(tmp_path: Path) -> None:
    store = open_storage(str(tmp_path))
    for number in range(40):
        answers: list[object] = []
        together = threading.Barrier(2)

        def write(folder: str = f"t/job/weights/{number}") -> None:
            together.wait(10)  # noqa: B023
            try:
                answers.append(store.put(folder, FILES))  # noqa: B023
            except StorageFailed:
                answers.append(StorageFailed)  # noqa: B023

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert answers.count(True) == 1, answers
        assert store.read(f"t/job/weights/{number}", "b") == FILES[1][1]
    assert len(store.folders("t/job/weights")) == 40


# -- stores that fail -------------------------------------------------------------------------------------------------


@contextmanager
def put_fails(number: int, *, after: bool) -> Iterator[None]:
    """The object store refuses its `number`-th put, before or after it has done it."""
    puts, real = count(1), MemoryFileSystem.pipe_file

    def pipe_file(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        fails = next(puts) == number
        if after or not fails:
            real(self, path, value, **kwargs)
        if fails:
            raise RuntimeError("the network is gone")  # drivers raise whatever they like

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        yield


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_put_that_fails_in_an_object_store_leaves_nothing(base: BaseModel, number: int, after: bool) -> None:
    MemoryFileSystem.store.clear()
    driver = trained(base, "memory://bucket")
    before = driver.adapter("t/job").rows.clone()
    item = driver.item("t/job", SaveState("x"))
    with put_fails(number, after=after):
        (outcome,) = driver.engine.run([item])
    assert isinstance(outcome.error, StorageFailed)
    assert outcome.error.message.endswith("RuntimeError: the network is gone")
    assert driver.adapter("t/job").rows.equal(before)
    if number == 4 and after:  # the manifest is there: so the checkpoint is, and the same request again finds it
        assert len(MemoryFileSystem.store) == 4
        assert driver.engine.run([item])[0].error is None
    else:
        assert not MemoryFileSystem.store
        driver.good(("t/job", SaveState("x")))
    driver.good(("t/new", LoadState("mainspring://job/weights/x", optimizer=True)))
    MemoryFileSystem.store.clear()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, after a part of them was done, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 20_000, 60_000])
def test_a_write_that_goes_half_way_leaves_nothing(base: BaseModel, tmp_path: Path, size: int) -> None:
    driver = trained(base, tmp_path)
    before = driver.adapter("t/job").rows.clone()
    with file_size_limit(size):
        (outcome,) = driver.run(("t/job", SaveState("x")))
    assert isinstance(outcome.error, StorageFailed)
    assert outcome.error.message == f"writing {tmp_path}/{FOLDER}: File too large"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not list((tmp_path / "t/job/weights").iterdir())
    assert driver.adapter("t/job").rows.equal(before)
    driver.good(("t/job", SaveState("x")))


@pytest.mark.parametrize("size_kb", [4, 64, 100])
def test_a_full_disk(base: BaseModel, tmp_path: Path, size_kb: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "none", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this needs the right to mount a small disk")
    try:
        driver = trained(base, disk)
        (full,) = driver.run(("t/job", SaveState("x")))
        assert isinstance(full.error, StorageFailed)
        assert full.error.message.endswith(os.strerror(errno.ENOSPC))
        assert not [path for path in disk.rglob("*") if path.is_file()]
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        driver.good(("t/job", SaveState("x")), ("t/job", LoadState("mainspring://job/weights/x", optimizer=True)))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("number", range(1, 12))
def test_a_sync_that_fails_leaves_nothing(
    base: BaseModel, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, calls, real = trained(base, tmp_path), count(1), os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        (outcome,) = driver.run(("t/job", SaveState("x")))
    if next(calls) <= number:
        assert outcome.error is None
        return
    assert isinstance(outcome.error, StorageFailed)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    driver.good(("t/job", SaveState("x")))


# -- kill -9 ----------------------------------------------------------------------------------------------------------


def killed(action: Callable[[], object], number: int, arm: Callable[[Callable[[], None]], None]) -> bool:
    """Run `action` in a child process that dies at its `number`-th step. False: it had no so many steps and ended well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            steps = count(1)

            def step() -> None:
                if next(steps) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            arm(step)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def every_change_of_a_directory(step: Callable[[], None]) -> None:
    """A step before each call that changes files, and one in the middle of each write."""
    for name in ("mkdir", "rename", "fsync", "rmdir", "unlink"):
        setattr(os, name, _after(step, getattr(os, name)))

    def write(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            step()
            file.write(data[len(data) // 2 :])
            file.flush()
            os.fsync(file.fileno())

    storage._write = write


def local_object_store(root: Path) -> Storage:
    """fsspec on files instead of memory, since these outlive a process."""
    store = ObjectStore(f"file://{root}")
    store._fs.auto_mkdir = True
    return store


def every_put(step: Callable[[], None]) -> None:
    local = fsspec.get_filesystem_class("file")
    local.pipe_file = _after(step, local.pipe_file)


def _after(step: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(*args: Any, **kwargs: Any) -> Any:
        step()
        return call(*args, **kwargs)

    return stepped


@pytest.mark.parametrize(
    ("store_of", "arm", "steps"), [(Directory, every_change_of_a_directory, 15), (local_object_store, every_put, 4)]
)
def test_a_worker_killed_between_any_two_steps_of_a_save(
    base: BaseModel, tmp_path: Path, store_of: Any, arm: Callable[[Callable[[], None]], None], steps: int
) -> None:
    """Listed is a whole checkpoint or none; the save runs again and succeeds; and what was saved loads."""
    driver = trained(base, tmp_path)
    for number in count(1):
        root = tmp_path / str(number)
        root.mkdir()
        store = store_of(root)
        driver.engine._checkpoints = checkpoints = Checkpoints(store)
        item = driver.item("t/job", SaveState("x"))
        died = killed(lambda item=item: driver.engine.run([item]), number, arm)  # type: ignore[misc]
        for place, _ in checkpoints.list_checkpoints("t", "job"):
            checkpoints.load(place, optimizer=True)
        (again,) = driver.engine.run([item])
        assert again.error is None
        [(place, _)] = checkpoints.list_checkpoints("t", "job")
        driver.good(("t/new", LoadState(place.path, optimizer=True)))
        assert driver.adapter("t/new").rows.equal(driver.adapter("t/job").rows)
        assert torch.equal(driver.adapter("t/new").step, driver.adapter("t/job").step)
        if store_of is Directory:
            assert [path.name for path in (root / "t/job/weights").iterdir()] == ["x"]
        if not died:
            break
    assert number > steps
