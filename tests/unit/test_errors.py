"""The error tree: every code has its class and its line in the docstring, and survives the wire."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from mainspring_broker import errors
from mainspring_broker.codec import pack, unpack
from mainspring_broker.errors import BY_CODE, MainspringError, RequestError, from_wire

ABSTRACT = {"MainspringError", "RequestError", "InvalidRequest", "SubmitError", "ServiceError"}
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, MainspringError)
}


def drawn() -> dict[str, tuple[str, str | None]]:
    """Name -> (parent, code) of the tree in the docstring."""
    found: dict[str, tuple[str, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        row = re.match(r"^([\s│├└─]*)([A-Z]\w+)(?:\s{2,}([a-z_]+)\s{2,}\S)?", line)
        if not row or row[2] not in CLASSES:
            continue
        while above and above[-1][0] >= len(row[1]):
            above.pop()
        found[row[2]] = (above[-1][1] if above else "Exception", row[3])
        above.append((len(row[1]), row[2]))
    return found


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    tree = drawn()
    assert tree.keys() == CLASSES.keys()
    assert {name: parent for name, (parent, _) in tree.items()} == {
        name: cls.__bases__[0].__name__ for name, cls in CLASSES.items()
    }


def test_the_codes_in_the_docstring_are_the_codes() -> None:
    assert {name: code for name, (_, code) in drawn().items() if name not in ABSTRACT} == {
        name: cls.code for name, cls in CLASSES.items() if name not in ABSTRACT
    }


@pytest.mark.parametrize("name", CLASSES)
def test_every_code_maps_to_its_class_and_reads_like_its_name(name: str) -> None:
    cls = CLASSES[name]
    assert BY_CODE[cls.code] is cls
    if cls is not MainspringError:
        assert cls.code == re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def test_no_two_classes_share_a_code() -> None:
    assert len(BY_CODE) == len(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_an_error_survives_the_wire_and_pickle_and_copy(name: str) -> None:
    error = CLASSES[name]("what was wrong", datum=3, limit=[1, 2], message="a detail of that name")
    for back in (from_wire(unpack(pack(error.to_wire()))), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is type(error)
        assert str(back) == back.message == "what was wrong"
        assert back.details == error.details


def test_a_code_of_a_newer_version_is_a_request_error() -> None:
    back = from_wire({"code": "from_the_future", "message": "hello", "details": {"a": 1}})
    assert type(back) is RequestError
    assert (back.message, back.details) == ("hello", {"a": 1})


@pytest.mark.parametrize(
    "broken", [{}, {"code": None}, {"code": ["x"], "details": [1]}, {"message": 3, "details": {3: 4}}]
)
def test_a_broken_error_is_still_an_error(broken: dict[str, object]) -> None:
    assert isinstance(from_wire(broken), MainspringError)


def test_messages_are_bounded() -> None:
    assert len(MainspringError("x" * 100_000).message) == errors.MAX_MESSAGE_CHARS
    assert MainspringError("x" * errors.MAX_MESSAGE_CHARS).message[-1] == "x"
