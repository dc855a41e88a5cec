"""What importing the client costs, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import mainspring
from mainspring_broker import errors


def test_import_brings_in_neither_torch_nor_transformers():
    script = "import sys, mainspring; print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_using_types_without_torch_does_not_bring_it_in():
    script = (
        "import sys, mainspring as trio\n"
        "trio.Datum(trio.ModelInput.from_ints([1]), {'weights': [1.0]}).loss_fn_inputs['weights'].numpy()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_all_is_sorted_and_complete():
    assert list(mainspring.__all__) == sorted(mainspring.__all__)
    for name in mainspring.__all__:
        assert getattr(mainspring, name).__doc__ is not None or issubclass(getattr(mainspring, name), Exception)
    assert {cls.__name__ for cls in errors.BY_CODE.values()} <= set(mainspring.__all__)


def test_a_client_that_is_never_used_starts_nothing():
    script = (
        "import threading, mainspring as trio\n"
        "client = trio.ServiceClient('redis://127.0.0.1:1/0')\n"
        "print(threading.active_count())\n"
        "client.close()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("1", "")
