"""Who may import whom, and whether the built wheel is whole: what a user installs is not what a source tree shows."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["mainspring", "mainspring_broker", "mainspring_clock", "mainspring_ops", "mainspring_workers"]

# Runs in the fresh environment, from "/": only what the wheel brought is there.
PROBE = """
import importlib, importlib.util, sys
from importlib import resources
from pathlib import Path

for name in {packages}:
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(sys.prefix), f"{{name}} comes from {{module.__file__}}"
assert "torch" not in sys.modules, "importing the packages loads torch"
for folder in ("broker", "clock", "workers", "sdk", "ops", "tests"):
    assert importlib.util.find_spec(folder) is None, f"the wheel makes {{folder!r}} importable"
from mainspring_broker import base_models, library
assert "ms_submit" in library.code()
assert (Path(base_models.resolve("mainspring-tiny")) / "model.safetensors").is_file()
print("ok")
"""


def test_import_rules_hold() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-4000:]


def test_the_client_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, mainspring; print([m for m in ('torch', 'transformers', 'peft', 'typer') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    lua = {path.name for path in (ROOT / "broker/mainspring_broker/lua").glob("*.lua")}
    assert {Path(name).name for name in names if name.endswith(".lua")} == lua


def test_the_wheel_works_where_only_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment; its dependencies are lent from this one, our own source tree is not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)  # what pip does with a pure wheel, but for scripts
    lent = tmp_path / "lent"
    lent.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "mainspring" not in entry.name:  # neither the editable install nor its .pth
            (lent / entry.name).symlink_to(entry)
    (site / "lent.pth").write_text(f"{lent}\n")
    found = subprocess.run(
        [python, "-c", PROBE.format(packages=PACKAGES)], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == "ok", found.stderr[-3000:]
    said = subprocess.run([python, "-m", "mainspring_ops", "--help"], cwd="/", capture_output=True, text=True)
    assert "Commands:" in said.stdout, said.stderr[-3000:]
