"""Four data sets that every CPython 3.11+ carries, for demos and checks without any download.

They differ so much in kind that an adapter trained on one is of no use on another, and none of
them is part of ``pydoc_data.topics``, the text our own base model was trained on.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil


def topics() -> dict[str, str]:
    """Name -> text, four kinds of at least 20,000 characters each, the same order every time.

    - ``turtle``: help texts in simple English with small examples (docstrings of ``turtle``)
    - ``decimal``: doctests with numbers (docstrings of ``_pydecimal``)
    - ``email``: source code (the modules of the ``email`` package)
    - ``entities``: a table, one character a line (``html.entities``)

    Texts differ a little between Python versions.
    """
    return {
        "turtle": _docstrings("turtle"),
        "decimal": _docstrings("_pydecimal"),
        "email": _package_source("email"),
        "entities": _entities(),
    }


def _source(module: str) -> str:
    """A module's own source text, found without running it.

    ``turtle`` cannot be imported where Tk is missing (Debian, containers), its file is still there.
    """
    spec = importlib.util.find_spec(module)
    get_source = getattr(spec.loader if spec else None, "get_source", None)
    text: str | None = get_source(module) if get_source else None
    if text is None:
        raise RuntimeError(
            f"This Python has no source of its standard module {module!r}; the built-in topics need a "
            "complete standard library (on Debian: apt install libpython3-stdlib)."
        )
    return text


def _docstrings(module: str) -> str:
    """All docstrings of a module, in the file's order, each once, blank lines between."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(_source(module))) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    found = [inspect.cleandoc(ast.get_docstring(node) or "").strip() for node in nodes]
    # dict.fromkeys drops repeats, so that a held-out tail is not a copy of the start.
    return "\n\n".join(dict.fromkeys(text for text in found if text))


def _package_source(package: str) -> str:
    """The source of a package's own modules, by name, without sub-packages."""
    path = importlib.import_module(package).__path__
    names = sorted(info.name for info in pkgutil.iter_modules(path) if not info.ispkg)
    return "\n\n".join(_source(f"{package}.{name}").strip() for name in names)


def _entities() -> str:
    """HTML's named characters as lines such as ``&eacute; = é U+00E9``.

    Ordered by code point, not by name, so that neighbours do not differ by one letter only.
    """
    table: dict[str, str] = importlib.import_module("html.entities").html5
    rows = sorted((text, name) for name, text in table.items() if name.endswith(";"))
    return "\n".join(f"&{name} = {text} " + " ".join(f"U+{ord(c):04X}" for c in text) for text, name in rows)
