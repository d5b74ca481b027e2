"""Mixture-of-Experts layers as one self-scheduling kernel per rank.

::

    import switchyard, torch

    experts = switchyard.Experts(w13, w2, top_k=8)      # [E, 2 I, H] and [E, H, I], used in place
    y = experts(x, topk_ids, topk_weights)              # one kernel on the current stream

``switchyard.register_with_transformers()`` makes ``experts_implementation="switchyard"`` known to
transformers. ``switchyard doctor`` says what this machine can do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._library import has_cuda, version
from ._activation import Activation
from .errors import (
    Aborted,
    CapacityExceeded,
    DTypeMismatch,
    Error,
    InvalidArgument,
    InvalidConfig,
    InvalidFile,
    MissingTensor,
    OutOfMemory,
    ShapeMismatch,
    SpecMismatch,
    SystemFailure,
    Timeout,
    Unsupported,
)
from ._exchange import Exchange, ExchangeHandle, ExchangeStats, Received
from ._experts import Experts, experts
from ._heap import HeapStats, PeerMap, SymmetricHeap
from ._operators import GroupedGemm, GroupedSchedule, Permutation, grouped_gemm, permute, unpermute
from ._options import Diagnostics, Memory, Numerics, Placement
from ._passes import Stats
from ._routing import Routing, topk
from ._workspace import DeviceAllocator, Workspace
from ._world import World
from . import tuner

if TYPE_CHECKING:
    from ._layer import MoeLayer
    from ._hf_patch import patch, register_with_transformers

__version__ = version()

__all__ = [
    "Aborted",
    "Activation",
    "CapacityExceeded",
    "DTypeMismatch",
    "DeviceAllocator",
    "Diagnostics",
    "Error",
    "Exchange",
    "ExchangeHandle",
    "ExchangeStats",
    "Experts",
    "GroupedGemm",
    "GroupedSchedule",
    "HeapStats",
    "InvalidArgument",
    "InvalidConfig",
    "InvalidFile",
    "Memory",
    "MissingTensor",
    "MoeLayer",
    "Numerics",
    "OutOfMemory",
    "PeerMap",
    "Permutation",
    "Placement",
    "Received",
    "Routing",
    "ShapeMismatch",
    "SpecMismatch",
    "Stats",
    "SymmetricHeap",
    "SystemFailure",
    "Timeout",
    "Unsupported",
    "Workspace",
    "World",
    "experts",
    "grouped_gemm",
    "has_cuda",
    "patch",
    "permute",
    "register_with_transformers",
    "topk",
    "tuner",
    "unpermute",
    "version",
]

# Names whose modules need torch or transformers. Such a module is imported when its name is asked for.
_LATER = {
    "MoeLayer": "_layer",
    "patch": "_hf_patch",
    "register_with_transformers": "_hf_patch",
}


# Checkers of types would take any name for one of a module that has it, and misspelt ones, too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            import importlib

            return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
