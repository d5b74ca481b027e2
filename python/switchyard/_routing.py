"""From router logits to expert ids and weights."""

from __future__ import annotations

import ctypes
import dataclasses
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays
from .errors import DTypeMismatch, InvalidArgument, check

_SCORES = ("softmax", "sigmoid", "sqrt_softplus")
_GROUP_SCORES = ("max", "sum_top_two")
_METHODS = ("top_k", "sparse_mixer")


@dataclasses.dataclass(frozen=True)
class Routing:
    """How logits become experts. Ties go to the lower index.

    Parameters
    ----------
    method : {"top_k", "sparse_mixer"}
        "sparse_mixer": Phi-3.5-MoE.
    score : {"softmax", "sigmoid", "sqrt_softplus"}
    top_k_before_score : bool
        Choose by logit and score only the chosen: GPT-OSS, Llama-4.
    renormalize : bool
        Divide the weights by their sum + renormalize_epsilon.
    groups, top_groups : int
        Experts form `groups` equal groups, of which the best `top_groups` compete.
    group_score : {"max", "sum_top_two"}
    scale : float
        Multiplies the weights at the end.
    """

    method: Literal["top_k", "sparse_mixer"] = "top_k"
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    top_k_before_score: bool = False
    renormalize: bool = False
    renormalize_epsilon: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "sum_top_two"] = "sum_top_two"
    scale: float = 1.0
    jitter_eps: float = 0.01

    def _to_c(self, has_correction_bias: bool) -> _abi.Routing:
        for name, value, known in (
            ("method", self.method, _METHODS),
            ("score", self.score, _SCORES),
            ("group_score", self.group_score, _GROUP_SCORES),
        ):
            if value not in known:
                raise InvalidArgument(f"{name} is {value!r}; use one of {', '.join(known)}")
        return _abi.Routing(
            method=_METHODS.index(self.method),
            score=_SCORES.index(self.score),
            top_k_before_score=int(self.top_k_before_score),
            renormalize=int(self.renormalize),
            renormalize_epsilon=self.renormalize_epsilon,
            has_correction_bias=int(has_correction_bias),
            num_groups=self.groups,
            top_k_groups=self.top_groups,
            group_score=_GROUP_SCORES.index(self.group_score),
            scale=self.scale,
            jitter_eps=self.jitter_eps,
        )


def topk(
    logits: Any,
    k: int,
    *,
    correction_bias: Any = None,
    ids_out: Any = None,
    weights_out: Any = None,
    **routing: Any,
) -> tuple[Any, Any]:
    """Choose experts, where the logits are: on the host, or on their GPU's current stream.

    On a GPU it gives the ids and weights of a layer's gate, waits for nothing, and may be captured.

    Parameters
    ----------
    logits : array [T, E], float32, contiguous
        Of torch or numpy. On a GPU a tensor of torch, also bfloat16 or float16, whose rows are
        contiguous. A NaN is never chosen.
    k : int
    correction_bias : array [E], float32, optional
        Added to the scores for choosing, not for weighting.
    ids_out, weights_out : array [T, k], int32 and float32, contiguous, optional
    **routing
        Fields of `Routing`: score, renormalize, groups, top_groups, scale, ...

    Returns
    -------
    ids : array [T, k], int32
        In descending order of what was chosen by; -1 where no expert was left.
    weights : array [T, k], float32

    Raises
    ------
    InvalidArgument, DTypeMismatch, ShapeMismatch
    Unsupported
        For tensors on a GPU that the library does not run on.
    """
    c_routing = Routing(**routing)._to_c(correction_bias is not None)
    described, keep = _arrays.describe("logits", logits)
    cuda = described.device_type == _abi.CUDA
    if described.dtype != _abi.F32 and not (cuda and described.dtype in (_abi.BF16, _abi.F16)):
        types = "float32, bfloat16 or float16" if cuda else "float32"
        raise DTypeMismatch(f"logits are {_abi.DTYPE_NAMES[described.dtype]}; pass {types}")
    if described.ndim != 2:
        raise InvalidArgument(f"logits are {_arrays.shape_of(described)}; pass [T, E]")
    shape = (described.shape[0], k)
    if _arrays.is_torch(logits):
        import torch

        device = logits.device
        ids = torch.empty(shape, dtype=torch.int32, device=device) if ids_out is None else ids_out
        weights = torch.empty(shape, dtype=torch.float32, device=device) if weights_out is None else weights_out
    elif cuda and (ids_out is None or weights_out is None):
        raise InvalidArgument(
            f"logits are a {type(logits).__name__} on a GPU; pass a tensor of torch, or ids_out and "
            "weights_out"
        )
    elif ids_out is not None and weights_out is not None:
        ids, weights = ids_out, weights_out
    else:
        import numpy

        ids = numpy.empty(shape, dtype=numpy.int32) if ids_out is None else ids_out
        weights = numpy.empty(shape, dtype=numpy.float32) if weights_out is None else weights_out
    call = _abi.TopkCall(top_k=k, routing=ctypes.pointer(c_routing), logits=described)
    kept = [keep]
    for field, name, array in (
        ("ids", "ids_out", ids),
        ("weights", "weights_out", weights),
        ("correction_bias", "correction_bias", correction_bias),
    ):
        if array is None:
            continue
        tensor, kept_too = _arrays.describe(name, array)
        _arrays.require_same_device(name, tensor, "logits", described)
        setattr(call, field, tensor)
        kept.append(kept_too)
    if cuda:
        call.stream = _arrays.current_stream(logits)
    check(_abi.library.sy_topk_run(byref(call)))
    del kept
    return ids, weights
