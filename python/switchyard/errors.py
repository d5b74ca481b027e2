"""Typed errors: every one names what was wrong, with which value, and what to do about it."""

from __future__ import annotations

__all__ = [
    "Aborted", "CapacityExceeded", "DTypeMismatch", "Error", "InvalidArgument", "InvalidConfig",
    "InvalidFile", "MissingTensor", "OutOfMemory", "ShapeMismatch", "SpecMismatch", "SystemFailure",
    "Timeout", "Unsupported",
]


class Error(RuntimeError):
    """Any error of Switchyard.

    Attributes
    ----------
    code : str
        The name of the error's kind, the same as in C++ and C: ``"invalid_argument"``,
        ``"timeout"``, ...
    """

    code: str = "internal"


class InvalidArgument(Error, ValueError):
    """A value passed by the caller is out of its domain."""

    code = "invalid_argument"


class InvalidConfig(Error, ValueError):
    """config.json is malformed, inconsistent or of an unknown family."""

    code = "invalid_config"


class InvalidFile(Error):
    """A file is truncated, or its header disagrees with its contents."""

    code = "invalid_file"


class MissingTensor(Error):
    """A tensor that the layer needs was not given, or is not in the checkpoint."""

    code = "missing_tensor"


class ShapeMismatch(Error, ValueError):
    """A tensor was given, but not with the shape that is needed."""

    code = "shape_mismatch"


class DTypeMismatch(Error, TypeError):
    """A tensor was given, but not with a dtype that can be used there."""

    code = "dtype_mismatch"


class Unsupported(Error, NotImplementedError):
    """Understood, but not implemented by this build or on this machine."""

    code = "unsupported"


class CapacityExceeded(Error):
    """More tokens than the declared maximum, or not enough memory."""

    code = "capacity_exceeded"


class SpecMismatch(Error):
    """The ranks of a world disagree on the layer, the limits or the call."""

    code = "spec_mismatch"


class _WaitFailed(Error, TimeoutError):
    """What the first waiter whose deadline passed saw.

    Attributes
    ----------
    waiter : int
        The rank whose deadline passed; -1 if it is not known.
    peer : int
        The rank it waited for; -1 if it is not known.
    phase : str
        "slots", "counts", "dispatch", "combine", ...
    epoch : int
        The number of the pass, from 1 on.
    """

    waiter: int = -1
    peer: int = -1
    phase: str = ""
    epoch: int = 0


class Timeout(_WaitFailed):
    """A wait passed its deadline: another rank did not do its part."""

    code = "timeout"


class Aborted(_WaitFailed):
    """Another rank failed first, or the world was aborted."""

    code = "aborted"


class SystemFailure(Error, OSError):
    """A call of the operating system failed."""

    code = "system"


class OutOfMemory(Error, MemoryError):
    """The host has no memory left."""

    code = "out_of_memory"
