"""What is saved comes back: weights alone, or with the optimizer; everything else is an error that says why, and changes nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from torch import Tensor

from mainspring_broker import errors
from mainspring_broker.wire import End, Init, LoadState, Operation, SaveState, SaveWeights
from mainspring_workers import manifest
from mainspring_workers.base_model import BaseModel
from mainspring_workers.checkpoints import Checkpoints
from mainspring_workers.engine import Outcome
from mainspring_workers.manifest import Place
from mainspring_workers.storage import open_storage
from tests.tiny import Driver, batch, optim, random_datums, tiny_base

INIT = Init(rank=8, seed=1)
FILES = ["adapter_config.json", "adapter_model.safetensors", "checkpoint.json", "optimizer.safetensors"]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return tiny_base()


@pytest.fixture(params=["directory", "object store"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "directory":
        yield str(tmp_path)
        return
    yield f"memory://{uuid4().hex}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def driver(base: BaseModel, tmp_path: Path) -> Driver:
    return trained(base, tmp_path)


def update(driver: Driver, job: str, number: int) -> None:
    driver.good((job, batch(random_datums(number, [9, 4]))), (job, optim(5e-2)))


def trained(base: BaseModel, url: str | Path, *, job: str = "t/job", init: Init = INIT, updates: int = 2) -> Driver:
    driver = Driver(base, url)
    driver.good((job, init))
    for number in range(updates):
        update(driver, job, number)
    return driver


def state(driver: Driver, job: str = "t/job") -> Tensor:
    """Weights, gradient, moments and step."""
    adapter = driver.adapter(job)
    return torch.cat([adapter.rows.flatten(), adapter.step[None]])


def failed(outcome: Outcome, kind: type[errors.MainspringError]) -> str:
    assert type(outcome.error) is kind, outcome
    return outcome.error.message


def refused(driver: Driver, operation: Operation, kind: type[errors.MainspringError], job: str = "t/job") -> str:
    """The message of a request that fails and changes nothing."""
    before = state(driver, job)
    (outcome,) = driver.run((job, operation))
    assert state(driver, job).equal(before)
    return failed(outcome, kind)


def listed(url: str | Path, job: str = "job", tenant: str = "t") -> list[str]:
    return [place.path for place, _ in Checkpoints(open_storage(str(url))).list_checkpoints(tenant, job)]


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [INIT, Init(rank=3, seed=2, train_mlp=False, alpha=7.5)])
def test_another_job_in_another_worker_goes_on_as_if_nothing_had_happened(
    base: BaseModel, url: str, init: Init
) -> None:
    live = trained(base, url, init=init, updates=5)
    (saved,) = live.good(("t/job", SaveState("five")))
    assert saved["path"] == "mainspring://job/weights/five"
    update(live, "t/job", 5)

    other = Driver(base, url)
    (with_optimizer,) = other.good(("t/resumed", LoadState(saved["path"], optimizer=True)))
    (weights_only,) = other.good(("t/fresh", LoadState(saved["path"])))
    for job in ("t/resumed", "t/fresh"):
        update(other, job, 5)

    facts = {
        name: getattr(init, name) for name in ("rank", "seed", "train_attn", "train_mlp", "train_unembed", "alpha")
    }
    parameters = live.adapter("t/job").parameters
    assert with_optimizer == {**facts, "parameters": parameters, "step": 5}
    assert weights_only == {**facts, "parameters": parameters, "step": 0}
    expected, adapter = live.adapter("t/job"), other.adapter("t/resumed")
    assert (expected.rows - adapter.rows).abs().max() <= 1e-6
    assert adapter.step == expected.step == 6
    assert (expected.weights - other.adapter("t/fresh").weights).abs().max() > 1e-3
    assert other.adapter("t/fresh").step == 1


def test_a_job_goes_back_and_its_pending_gradient_and_poison_go(driver: Driver) -> None:
    (saved,) = driver.good(("t/job", SaveState("here")))
    before = state(driver)
    update(driver, "t/job", 7)
    bad = replace(batch(random_datums(1, [4])), loss_fn="no such loss")
    driver.run(("t/job", batch(random_datums(1, [4]))), ("t/job", bad))
    (loaded,) = driver.good(("t/job", LoadState(saved["path"], optimizer=True)))
    assert loaded["step"] == 2
    assert state(driver).equal(before)
    (step,) = driver.run(("t/job", optim()))
    failed(step, errors.NoGradient)

    update(driver, "t/job", 7)
    driver.good(("t/job", LoadState(saved["path"])))
    adapter = driver.adapter("t/job")
    assert adapter.weights.equal(before[: adapter.parameters])
    assert not torch.cat([adapter.exp_avg, adapter.exp_avg_sq, adapter.step[None]]).any()


def test_a_save_in_the_middle_of_an_update_leaves_the_pending_gradient_alone(driver: Driver) -> None:
    driver.good(("t/job", batch(random_datums(8, [5]))))
    gradient = driver.adapter("t/job").grad.clone()
    (saved, step) = driver.good(("t/job", SaveState("half")), ("t/job", optim()))
    assert step["metrics"]["grad_norm"] == pytest.approx(float(gradient.norm()))
    driver.good(("t/new", LoadState(saved["path"], optimizer=True)))
    assert not driver.adapter("t/new").grad.any()


def test_saved_weights_load_without_optimizer_only(driver: Driver) -> None:
    (saved,) = driver.good(("t/job", SaveWeights("w")))
    message = refused(driver, LoadState(saved["path"], optimizer=True), errors.NoOptimizerState)
    assert "mainspring://job/sampler_weights/w has no optimizer state" in message
    driver.good(("t/new", LoadState(saved["path"])))
    assert driver.adapter("t/new").weights.equal(driver.adapter("t/job").weights)


def test_a_checkpoint_outlives_its_job(driver: Driver) -> None:
    (saved, _) = driver.good(("t/job", SaveState("x")), ("t/job", End()))
    driver.good(("t/job2", LoadState(saved["path"])))


def test_what_the_manifest_says(driver: Driver, tmp_path: Path) -> None:
    (saved,) = driver.good(("t/job", SaveState("x", ttl_seconds=60)))
    folder = Path(saved["location"])
    assert folder == tmp_path / "t/job/weights/x"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    said = json.loads((folder / "checkpoint.json").read_text())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "checkpoint.json"}
    assert {name: file["size"] for name, file in said.pop("files").items()} == sizes
    assert saved["size_bytes"] == sum(sizes.values())
    assert said.pop("created") < said.pop("expires")
    assert said == {
        "kind": "weights",
        "base_model": "tiny-llama",
        "rank": 8,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "alpha": 32.0,
        "seed": 1,
        "step": 2,
        "request": "t/job 6",
        "format": 1,
        "sha256": said["sha256"],
    }


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "said"),
    [
        (Init(rank=4, seed=1), "rank is 8 there and 4 here"),
        (Init(rank=8, seed=1, train_mlp=False), "train_mlp is True there and False here"),
        (
            Init(rank=2, seed=1, train_attn=False, alpha=1.0),
            "rank is 8 there and 2 here, train_attn is True there and False here, alpha is 32.0 there and 1.0 here",
        ),
    ],
)
def test_another_rank_or_other_layers_are_named_on_both_sides(driver: Driver, init: Init, said: str) -> None:
    (saved, _) = driver.good(("t/job", SaveState("x")), ("t/other", init))
    for optimizer in (False, True):
        message = refused(driver, LoadState(saved["path"], optimizer), errors.CheckpointMismatch, "t/other")
        assert message == f"mainspring://job/weights/x does not fit this job: {said}"


def test_another_base_model_is_named_on_both_sides(driver: Driver, tmp_path: Path) -> None:
    (saved,) = driver.good(("t/job", SaveState("x")))
    other = Driver(tiny_base("qwen2"), tmp_path)
    (outcome,) = other.run(("t/new", LoadState(saved["path"])))
    assert "base_model is 'tiny-llama' there and 'tiny-qwen2' here" in failed(outcome, errors.CheckpointMismatch)
    assert not other.engine.has("t/new")


def test_a_base_model_of_the_same_name_but_other_sizes_is_noticed(driver: Driver, tmp_path: Path) -> None:
    (saved,) = driver.good(("t/job", SaveState("x")))
    wider = Driver(tiny_base(hidden_size=64), tmp_path)
    (opening, later) = wider.run(("t/new", LoadState(saved["path"])), ("t/new", SaveState("y")))
    assert "[8, 32], needed is [8, 64]" in failed(opening, errors.CheckpointMismatch)
    failed(later, errors.StateLost)
    assert not wider.engine.has("t/new")
    wider.good(("t/old", INIT))
    refused(wider, LoadState(saved["path"]), errors.CheckpointMismatch, "t/old")


def test_a_failed_load_leaves_the_gradient_to_its_step(driver: Driver) -> None:
    forward_backward = batch(random_datums(8, [5]))
    driver.good(("t/job", forward_backward))
    refused(driver, LoadState("mainspring://job/weights/nothing"), errors.CheckpointNotFound)
    driver.good(("t/job", optim()))


@pytest.mark.parametrize("path", ["mainspring://job/weights/nothing", "mainspring://job/weights/x/y", "x"])
def test_a_job_whose_first_request_fails_never_opened(driver: Driver, path: str) -> None:
    opening, *later = driver.run(("t/new", LoadState(path)), ("t/new", optim()), ("t/new", LoadState(path)))
    assert isinstance(opening.error, errors.InvalidRequest)
    for outcome in later:
        failed(outcome, errors.StateLost)
    assert not driver.engine.has("t/new")


def test_there_is_no_slot_for_it(base: BaseModel, tmp_path: Path) -> None:
    driver = Driver(base, tmp_path, slots=1)
    (_, saved) = driver.good(("t/job", INIT), ("t/job", SaveState("x")))
    (outcome,) = driver.run(("t/new", LoadState(saved["path"])))
    failed(outcome, errors.OutOfMemory)


# -- names, paths, tenants --------------------------------------------------------------------------------------------


def test_another_tenants_path_is_not_found(driver: Driver) -> None:
    (saved,) = driver.good(("t/job", SaveState("x")))
    driver.good(("thief/job2", INIT))
    refused(driver, LoadState(saved["path"]), errors.CheckpointNotFound, "thief/job2")
    (outcome,) = driver.run(("thief/new", LoadState(saved["path"])))
    failed(outcome, errors.CheckpointNotFound)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "mainspring://",
        "mainspring://job/weights",
        "mainspring://job/weights/",
        "mainspring://t/job/weights/x",
        "mainspring://../t/job/weights/x",
        "mainspring://job/weights/../x",
        "mainspring://job/weights/..",
        "mainspring://../weights/x",
        "mainspring://./weights/x",
        "mainspring://job/adapters/x",
        "mainspring://job/weights/x\x00",
        "mainspring://job\x00/weights/x",
        "mainspring://job/weights/x\n",
        "mainspring:///weights/x",
        "MAINSPRING://job/weights/x",
        "tinker://job/weights/x",
        "job/weights/x",
        "/etc/passwd",
        "mainspring://job/weights/" + "x" * 100_000,
    ],
)  # fmt: skip
def test_a_path_that_is_no_path_is_refused(driver: Driver, path: str) -> None:
    driver.good(("t/job", SaveState("x")))
    message = refused(driver, LoadState(path), errors.PayloadInvalid)
    assert message.endswith("mainspring://<job>/weights/<name> or mainspring://<job>/sampler_weights/<name>")


@pytest.mark.parametrize("save", [SaveState, SaveWeights])
@pytest.mark.parametrize("name", ["", "..", "a/b", "../../other/job/weights/x", "/x", "a\x00", "~x", "a~b", "x" * 201])
def test_a_name_that_is_no_name_is_refused(
    driver: Driver, tmp_path: Path, name: str, save: type[SaveState | SaveWeights]
) -> None:
    refused(driver, save(name), errors.PayloadInvalid)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("job", ["../evil", "a/b", "t/..", "t/a/b", "t/", ".hidden/x"])
def test_no_job_leaves_its_folder(base: BaseModel, tmp_path: Path, job: str) -> None:
    (tmp_path / "storage").mkdir()
    driver = Driver(base, tmp_path / "storage")
    driver.good((job, Init(rank=2, seed=1)))
    (outcome,) = driver.run((job, SaveState("x")))
    if job != "a/b":  # tenant a, job b
        failed(outcome, errors.StorageFailed)
        assert not list((tmp_path / "storage").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]


# -- once only --------------------------------------------------------------------------------------------------------


def test_a_name_is_used_once_by_each_kind(base: BaseModel, url: str) -> None:
    driver = trained(base, url)
    (state_path, weights_path) = (
        r["path"] for r in driver.good(("t/job", SaveState("x")), ("t/job", SaveWeights("x")))
    )
    update(driver, "t/job", 9)
    assert "use another name" in refused(driver, SaveState("x"), errors.CheckpointExists)
    refused(driver, SaveWeights("x"), errors.CheckpointExists)
    assert listed(url) == [weights_path, state_path] or listed(url) == [state_path, weights_path]


def test_the_same_request_again_has_saved_it(base: BaseModel, url: str) -> None:
    driver = trained(base, url)
    item = driver.item("t/job", SaveState("x"))
    (first,) = driver.engine.run([item])
    kept = driver.adapter("t/job").weights.clone()
    update(driver, "t/job", 9)  # a replay may end in other rounding errors; what was promised once stays
    (again,) = driver.engine.run([item])
    assert again == first
    driver.engine.drop("t/job")  # its worker died before the commit
    (lost,) = driver.engine.run([item])
    assert lost == first
    (other,) = driver.engine.run([replace(item, chain="another", seq=99)])
    failed(other, errors.StateLost)
    driver.good(("t/new", LoadState("mainspring://job/weights/x", optimizer=True)))
    assert driver.adapter("t/new").weights.equal(kept)


def test_a_request_without_a_chain_is_never_taken_for_another(driver: Driver) -> None:
    first, second = (replace(driver.item("t/job", SaveState("x")), chain="") for _ in range(2))
    assert driver.engine.run([first])[0].error is None
    failed(driver.engine.run([second])[0], errors.CheckpointExists)


# -- time to live -----------------------------------------------------------------------------------------------------


def test_an_expired_checkpoint_is_gone_for_loading_and_its_name_is_free(
    base: BaseModel, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = trained(base, url)
    (saved,) = driver.good(("t/job", SaveState("x", ttl_seconds=60)))
    refused(driver, SaveState("x"), errors.CheckpointExists)
    driver.good(("t/job", LoadState(saved["path"], optimizer=True)))
    monkeypatch.setattr(manifest, "now", lambda: REAL_NOW() + timedelta(seconds=61))
    message = refused(driver, LoadState(saved["path"]), errors.CheckpointExpired)
    assert message.startswith("mainspring://job/weights/x was kept until 20")
    update(driver, "t/job", 9)
    driver.good(("t/job", SaveState("x")))
    assert listed(url) == [saved["path"]]
    driver.good(("t/new", LoadState(saved["path"])))
    assert driver.adapter("t/new").weights.equal(driver.adapter("t/job").weights)


REAL_NOW = manifest.now


@pytest.mark.parametrize("ttl", [0, -1, 10**9, 10**30])
def test_a_time_to_live_out_of_range_is_refused(driver: Driver, tmp_path: Path, ttl: int) -> None:
    message = refused(driver, SaveState("x", ttl), errors.PayloadInvalid)
    assert message.startswith(f"ttl_seconds is {ttl}; allowed is 1 to 315360000")
    assert not listed(tmp_path)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_file_is_named(driver: Driver, name: str, damage: str) -> None:
    (saved,) = driver.good(("t/job", SaveState("x")))
    file = Path(saved["location"]) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x80
    match damage:
        case "flip":
            file.write_bytes(data)
        case "cut":
            file.write_bytes(data[: len(data) // 2])
        case "empty":
            file.write_bytes(b"")
        case "remove":
            file.unlink()
    if (name, damage) == ("checkpoint.json", "remove"):
        refused(driver, LoadState(saved["path"], optimizer=True), errors.CheckpointNotFound)
        assert "is in the way" in refused(driver, SaveState("x"), errors.StorageFailed)
        return
    message = refused(driver, LoadState(saved["path"], optimizer=True), errors.StorageFailed)
    assert message.startswith(f"mainspring://job/weights/x is damaged: {name}: ")
    if name == "optimizer.safetensors":
        driver.good(("t/job", LoadState(saved["path"])))


@pytest.mark.parametrize("change", [{"step": 3}, {"extra": 1}, {"expires": "soon"}, {"files": []}, None])
def test_a_manifest_that_somebody_has_changed_is_damage(driver: Driver, change: dict[str, Any] | None) -> None:
    (saved,) = driver.good(("t/job", SaveState("x")))
    file = Path(saved["location"]) / "checkpoint.json"
    file.write_text(json.dumps(change and json.loads(file.read_text()) | change))
    refused(driver, LoadState(saved["path"]), errors.StorageFailed)


def test_a_manifest_of_a_newer_format_is_said_to_be_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved,) = driver.good(("t/job", SaveState("x")))
    monkeypatch.setattr(manifest, "FORMAT", 0)
    message = refused(driver, LoadState(saved["path"]), errors.StorageFailed)
    assert "it is of format 1, this version reads 0" in message


def test_weights_that_are_not_finite_are_saved_as_they_are(driver: Driver) -> None:
    driver.adapter("t/job").weights[3] = math.nan
    (saved,) = driver.good(("t/job", SaveState("x")))
    driver.good(("t/new", LoadState(saved["path"])))
    assert torch.equal(driver.adapter("t/new").weights.isnan(), driver.adapter("t/job").weights.isnan())


def test_the_storage_folder_is_gone_and_comes_back(base: BaseModel, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    driver = trained(base, root)
    (saved,) = driver.good(("t/job", SaveState("x")))
    root.rename(tmp_path / "unmounted")
    assert "the storage folder is not there" in refused(driver, SaveState("y"), errors.StorageFailed)
    assert "the storage folder is not there" in refused(driver, LoadState(saved["path"]), errors.StorageFailed)
    assert not root.exists()
    (tmp_path / "unmounted").rename(root)
    driver.good(("t/job", LoadState(saved["path"])), ("t/job", SaveState("y")))
    shutil.rmtree(root)


def test_places_are_listed_with_their_manifests(driver: Driver, tmp_path: Path) -> None:
    driver.good(("t/job", SaveWeights("w")), ("t/job", SaveState("b")), ("t/job", SaveState("a")))
    found = Checkpoints(open_storage(str(tmp_path))).list_checkpoints("t", "job")
    assert [place for place, _ in found] == [
        Place("t", "job", "weights", "a"),
        Place("t", "job", "weights", "b"),
        Place("t", "job", "sampler_weights", "w"),
    ]
    assert [said.step for _, said in found] == [2, 2, 2]
    assert listed(tmp_path, "nobody") == listed(tmp_path, tenant="nobody") == []
