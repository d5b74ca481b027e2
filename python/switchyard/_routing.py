"""From router logits to expert ids and weights."""

from __future__ import annotations

import dataclasses
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays
from .errors import DTypeMismatch, InvalidArgument, Unsupported, check

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
    """Choose experts, on the host.

    Parameters
    ----------
    logits : array [T, E], float32, contiguous
        Of torch or numpy, in host memory. A NaN is never chosen.
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
        For tensors on GPUs.
    """
    c_routing = Routing(**routing)._to_c(correction_bias is not None)
    described, keep = _arrays.describe("logits", logits)
    if described.device_type != _abi.CPU:
        raise Unsupported("topk() of tensors on GPUs is not there yet; let a layer's gate route")
    if described.dtype != _abi.F32:
        raise DTypeMismatch(f"logits are {_abi.DTYPE_NAMES[described.dtype]}; pass float32")
    if described.ndim != 2:
        raise InvalidArgument(f"logits are {_arrays.shape_of(described)}; pass [T, E]")
    shape = (described.shape[0], k)
    if _arrays.is_torch(logits):
        import torch

        ids = torch.empty(shape, dtype=torch.int32) if ids_out is None else ids_out
        weights = torch.empty(shape, dtype=torch.float32) if weights_out is None else weights_out
    else:
        import numpy

        ids = numpy.empty(shape, dtype=numpy.int32) if ids_out is None else ids_out
        weights = numpy.empty(shape, dtype=numpy.float32) if weights_out is None else weights_out
    c_ids, _ = _arrays.describe("ids_out", ids)
    c_weights, _ = _arrays.describe("weights_out", weights)
    bias = None
    if correction_bias is not None:
        described_bias, bias_kept = _arrays.describe("correction_bias", correction_bias)
        bias = byref(described_bias)
    check(
        _abi.library.sy_topk(
            byref(c_routing), k, byref(described), bias, byref(c_ids), byref(c_weights), None
        )
    )
    return ids, weights
