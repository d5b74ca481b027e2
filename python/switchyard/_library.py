"""The library, loaded: functions and structs of the C interface that take numbers which fit, and its errors."""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
import threading
from typing import Any, NoReturn

from . import _abi, _values, errors
from ._missing import explain

# Fields and parameters whose arguments have other names in Python.
_ARGUMENTS = {
    "budget_seconds": "budget", "deadline_seconds": "deadline", "layer_index": "layer",
    "num_groups": "groups", "num_ranks": "size", "out_scale": "scale", "pointer": "array",
    "scale_cols": "block", "scale_rows": "block", "top_k_groups": "top_groups",
}
# Parameters that are given as a number. An address is as wide as a pointer, which ctypes would cut to size.
_ADDRESSES = {
    ("sy_heap_free", "pointer"): ctypes.c_uint64,
    ("sy_heap_translate", "pointer"): ctypes.c_uint64,
    ("sy_heap_signal", "flag"): ctypes.c_uint64,
    ("sy_heap_wait", "flag"): ctypes.c_uint64,
    # The struct stays where it is, so its address is taken once: ctypes checks a number faster than a byref().
    ("sy_layer_forward", "call"): ctypes.c_void_p,
}


def _check_of(name: str, kind: Any) -> Any:
    """The function that takes a value of a number's type, or refuses it by the argument's name; None: no number's."""
    argument, range = _ARGUMENTS.get(name, name), _values.RANGES.get(kind)
    if range is not None:
        return lambda value: _values.integer(argument, value, *range)
    if argument == "deadline":
        return lambda value: _values.seconds(argument, value)
    if kind is ctypes.c_float:
        return lambda value: _values.single(argument, value)
    if kind is ctypes.c_double:
        return lambda value: _values.number(argument, value)
    return None


class _Number:
    """A field of a struct that takes numbers which fit, and names the argument otherwise."""

    def __init__(self, field: Any, check: Any) -> None:
        self._field, self._check = field, check

    def __get__(self, struct: Any, owner: Any = None) -> Any:
        return self._field.__get__(struct, owner)

    def __set__(self, struct: Any, value: Any) -> None:
        self._field.__set__(struct, self._check(value))


def _check_fields() -> None:
    # The tensors of a call are described elsewhere.
    for struct in vars(_abi).values():
        if isinstance(struct, type) and issubclass(struct, ctypes.Structure) and struct is not _abi.Tensor:
            for name, kind, *_ in getattr(struct, "_fields_", ()):
                if check := _check_of(name, kind):
                    setattr(struct, name, _Number(getattr(struct, name), check))


def _with_checks(function: Any, parameters: dict[str, Any]) -> Any:
    """The function, with numbers that fit. An error of ctypes' own would hide which argument it is."""
    found = [(i, _check_of(name, kind)) for i, (name, kind) in enumerate(parameters.items())]
    checks = [(i, check) for i, check in found if check is not None]
    if not checks:
        return function

    def checked(*values: Any) -> Any:
        fitting = list(values)
        for i, check in checks:
            fitting[i] = check(fitting[i])
        return function(*fitting)

    return checked


def _path() -> pathlib.Path:
    """The library beside this file, or where SWITCHYARD_LIBRARY says: a build that is worked on."""
    named = os.environ.get("SWITCHYARD_LIBRARY")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(__file__).parent / "lib" / "libswitchyard_c.so"


def _load() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(explain(str(path), str(error))) from error
    try:
        found = library.sy_abi_version()
        missing = [name for name in _abi.FUNCTIONS if not hasattr(library, name)]
    except AttributeError:
        raise ImportError(
            f"{path} has no function sy_abi_version: it is no library of Switchyard's; leave SWITCHYARD_LIBRARY "
            "unset, or let it name a libswitchyard_c.so"
        ) from None
    if found != _abi.ABI_VERSION or missing:
        what = f"lacks {missing[0]}" if found == _abi.ABI_VERSION else f"has version {found} of the C interface"
        raise ImportError(
            f"{path} {what}, and this package needs version {_abi.ABI_VERSION} with all its functions: library and "
            "package come from different versions. Install the package anew, or build what SWITCHYARD_LIBRARY names "
            "anew if it is set."
        )
    for name, (result, parameters) in _abi.FUNCTIONS.items():
        function = getattr(library, name)
        parameters = {of: _ADDRESSES.get((name, of), kind) for of, kind in parameters.items()}
        function.argtypes, function.restype = list(parameters.values()), result
        setattr(library, name, _with_checks(function, parameters))
    return library


def _watch_signals() -> None:
    """Have calls of the main thread run the handlers of signals while they wait: Ctrl-C is answered at once."""
    if sys.implementation.name != "cpython":
        return
    api = ctypes.pythonapi
    functions = {
        "ensure": api.PyGILState_Ensure, "release": api.PyGILState_Release,
        "check_signals": api.PyErr_CheckSignals, "fetch": api.PyErr_Fetch,
        "restore": api.PyErr_Restore,
    }
    kinds = dict(_abi.Python._fields_[2:])
    addresses = {name: ctypes.cast(function, kinds[name]) for name, function in functions.items()}
    check(library.sy_watch_python_signals(ctypes.byref(_abi.Python(**addresses)), threading.main_thread().ident))


_check_fields()
library = _load()
# Of PyDLL, so with the lock of the interpreter, whose exception comes out of the call.
_raise_kept = ctypes.PyDLL(None, handle=library._handle).sy_raise_in_python


def version() -> str:
    return str(library.sy_version().decode())


def has_cuda() -> bool:
    return bool(library.sy_has_cuda())


_CLASSES = {getattr(_abi, kind.code.upper()): kind for kind in (getattr(errors, name) for name in errors.__all__)}


def raise_last() -> NoReturn:
    """Raise what this thread's last call of the library failed with."""
    found = _abi.Error()
    library.sy_last_error(ctypes.byref(found))
    if found.code == _abi.INTERRUPTED:
        _raise_kept()
    error = _CLASSES.get(found.code, errors.Error)(found.message.decode("utf-8", "replace"))
    if isinstance(error, errors._WaitFailed) and found.wait_failed:
        error.waiter = found.waiter_rank
        error.peer = found.peer_rank
        error.phase = found.phase.decode("utf-8", "replace")
        error.epoch = found.epoch
    raise error


def check(status: int) -> None:
    """Raise the error that a status of the library stands for."""
    if status:
        raise_last()


_watch_signals()
# The main thread of a child is the one that called fork().
os.register_at_fork(after_in_child=_watch_signals)
