"""A caller's values, checked before they reach the library: ctypes takes integers modulo 2**32, and refuses other values
in words of its own."""

from __future__ import annotations

import ctypes
import operator
import os
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import InvalidArgument

RANGES: dict[object, tuple[int, int]] = {
    ctypes.c_int32: (-(2**31), 2**31 - 1),
    ctypes.c_int64: (-(2**63), 2**63 - 1),
    ctypes.c_uint32: (0, 2**32 - 1),
    ctypes.c_uint64: (0, 2**64 - 1),
}


# The library counts in int32.
MOST_COUNT = 2**31 - 1
MOST_SINGLE = 3.4028234663852886e38
# The library refuses longer deadlines: milliseconds_of() in src/c_api/world.cpp.
MOST_SECONDS = 1e12


def count_text(count: int, noun: str) -> str:
    """Such as "1 token" and "12,345 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def refuse(message: str) -> NoReturn:
    raise InvalidArgument(message)


def integer(name: str, value: Any, low: int = -(2**63), high: int = 2**63 - 1) -> int:
    """A whole number in a range, which a flag is not."""
    try:
        if is_flag(value):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        refuse(f"{name} is {value!r}; use a whole number")
    # The other end may be refused in its turn, where the range is that of a number in C.
    if number < low:
        refuse(f"{name} is {number}; use {low} or more")
    if number > high:
        refuse(f"{name} is {number}; use {high} or less")
    return number


def number(name: str, value: Any) -> float:
    try:
        # A text would do, too.
        if hasattr(value, "__float__") or hasattr(value, "__index__"):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    refuse(f"{name} is {value!r}; use a number")


def single(name: str, value: Any) -> float:
    """A number that float32 does not make infinite."""
    found = number(name, value)
    try:
        struct.pack("<f", found)  # which takes infinity itself
    except OverflowError:
        refuse(f"{name} is {value!r}; use a number that float32 holds, up to {MOST_SINGLE:g}")
    return found


def seconds(name: str, value: Any) -> float:
    """A deadline. The library refuses those below 0."""
    found = number(name, value)
    if found > MOST_SECONDS:
        refuse(f"{name} is {value!r}; use {MOST_SECONDS:g} seconds or less, of which a year is waited at most")
    return found


def is_flag(value: object) -> bool:
    """Whether a value is a bool, of Python or numpy."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def flag(name: str, value: Any) -> int:
    """1 or 0 of a truth value, which a text or a count is not."""
    if is_flag(value):
        return int(bool(value))
    refuse(f"{name} is {value!r}; use True or False")


def refuse_accumulate(accumulate: Any) -> None:
    """Raise `InvalidArgument` if a result is to be added to an `out` that is None."""
    if flag("accumulate", accumulate):
        refuse("accumulate is True, but out is None; pass what to add to")


def text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        refuse(f"{name} is {value!r}; use a str")
    if "\0" in value:
        # C would take the part before it.
        refuse(f"the {name} has a zero byte; use printable characters")
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # Its value may be a secret.
        refuse(f"the {name} has half of a surrogate pair; use printable characters")


def choice(name: str, value: Any, choices: Sequence[str]) -> int:
    """The index of one of some words. (An array would compare its elements.)"""
    if not isinstance(value, str) or value not in choices:
        refuse(f"{name} is {value!r}; use one of {', '.join(choices)}")
    return choices.index(value)


def path(name: str, value: Any) -> bytes:
    try:
        found = os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        refuse(f"{name} is {value!r}; use a path")
    if b"\0" in found:
        refuse(f"{name} is {value!r}, which has a zero byte; use a path")
    return found


def whole_numbers(name: str, values: Any, low: int, high: int) -> list[int]:
    """Of a sequence or an array."""
    try:
        found = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        refuse(f"{name} is {values!r}; use a sequence of whole numbers")
    return [integer(f"{name}[{i}]", value, low, high) for i, value in enumerate(found)]


def integers(name: str, kind: Any, values: Any) -> Any:
    """An array of C of whole numbers; of one element, which nobody reads, where there are none."""
    checked = whole_numbers(name, values, *RANGES[kind])
    return (kind * max(len(checked), 1))(*checked)
