"""From router logits to expert ids and weights."""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import functools
import math
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays
from ._activation import count_words, is_flag, is_real, is_whole
from ._library import check, library
from ._values import MOST_COUNT, choice, count_text
from .errors import DTypeMismatch, InvalidArgument, ShapeMismatch

_SCORES = ("softmax", "sigmoid", "sqrt_softplus")
_GROUP_SCORES = ("max", "sum_top_two")
_METHODS = ("top_k", "sparse_mixer")
# As kMaxTopK in src/routing/route.h.
_MOST_CHOSEN = 32


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
    renormalize_epsilon : float
        DeepSeek-V3: 1e-20, LFM2-MoE: 1e-6.
    groups, top_groups : int
        Experts form `groups` equal groups, of which the best `top_groups` compete.
    group_score : {"max", "sum_top_two"}
        A group's score: its best expert's, or the sum of its best two.
    scale : float
        Multiplies the weights at the end.
    jitter_eps : float
        Half the threshold of "sparse_mixer".

    Raises
    ------
    InvalidArgument
        Naming a field of a value that it cannot have, or that the others give no meaning:
        "sparse_mixer" has one score and no groups, "top_k" no jitter_eps.
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

    def __post_init__(self) -> None:
        for name, known in (("method", _METHODS), ("score", _SCORES), ("group_score", _GROUP_SCORES)):
            choice(name, getattr(self, name), known)
        for name in ("top_k_before_score", "renormalize"):
            if not is_flag(getattr(self, name)):
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; pass True or False")
        for name in ("groups", "top_groups"):
            value = getattr(self, name)
            if not is_whole(value) or not 1 <= value <= MOST_COUNT:
                raise InvalidArgument(f"{name} is {value!r}; pass {count_words(value, 1)}")
        for name in ("renormalize_epsilon", "scale", "jitter_eps"):
            value = getattr(self, name)
            above = name == "scale"
            if not is_real(value) or not 0 <= value < math.inf or (above and value == 0):
                bound = "above 0" if above else "of at least 0"
                raise InvalidArgument(f"{name} is {value!r}; pass a finite number {bound}")
        if self.top_groups > self.groups:
            raise InvalidArgument(
                f"top_groups is {self.top_groups}, but groups is {self.groups}; pass at most as many"
            )
        if self.groups == 1 and self.group_score != "sum_top_two" and self.method != "sparse_mixer":
            raise InvalidArgument(
                f"group_score is {self.group_score!r}, but groups is 1, so that none is scored; give the number of "
                "groups, or leave it out"
            )
        if self.renormalize_epsilon and not self.renormalize:
            raise InvalidArgument(
                f"renormalize_epsilon is {self.renormalize_epsilon}, but renormalize is False; pass "
                "renormalize=True, or leave the epsilon out"
            )
        if self.method == "sparse_mixer":
            unused = ("score", "top_k_before_score", "groups", "top_groups", "group_score")
        else:
            unused = ("jitter_eps",)
        for name in unused:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise InvalidArgument(
                    f"{name} is {value!r}, but method={self.method!r} has no use for it; leave it out"
                )

    def _to_c(self, has_correction_bias: bool) -> _abi.Routing:
        if has_correction_bias and self.method == "sparse_mixer":
            raise InvalidArgument(
                "correction_bias is given, but method='sparse_mixer' has no use for it; leave it out"
            )
        return _abi.Routing(
            method=_METHODS.index(self.method), score=_SCORES.index(self.score),
            top_k_before_score=int(self.top_k_before_score), renormalize=int(self.renormalize),
            renormalize_epsilon=self.renormalize_epsilon,
            has_correction_bias=int(has_correction_bias), num_groups=self.groups,
            top_k_groups=self.top_groups, group_score=_GROUP_SCORES.index(self.group_score),
            scale=self.scale, jitter_eps=self.jitter_eps,
        )


@functools.lru_cache(64)
def _described(fields: tuple[tuple[str, Any, type], ...], has_correction_bias: bool) -> _abi.Routing:
    """Of fields of `Routing`, checked once. With their types: 1 is like True to a cache, and no flag."""
    known = {field.name for field in dataclasses.fields(Routing)}
    for name, value, _ in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidArgument(
                f"{name} is {value!r}, but a Routing has no such field{hint} (it has {', '.join(sorted(known))})"
            )
    return Routing(**{name: value for name, value, _ in fields})._to_c(has_correction_bias)


def _check_choice(k: Any, experts: int, routing: _abi.Routing) -> None:
    most = min(experts, _MOST_CHOSEN)
    if not is_whole(k) or not 1 <= k <= most:
        raise InvalidArgument(f"k is {k!r}; of {count_text(experts, 'expert')} pass an int of 1 to {most}")
    groups, top_groups = routing.num_groups, routing.top_k_groups
    if experts % groups:
        raise InvalidArgument(f"groups is {groups}, which does not divide the {count_text(experts, 'expert')} of logits")
    if groups > 1 and k > top_groups * (experts // groups):
        raise InvalidArgument(
            f"k is {k}, but the best {count_text(top_groups, 'group')} of {count_text(experts // groups, 'expert')} have only "
            f"{top_groups * (experts // groups)}; pass a smaller k, or more top_groups"
        )
    if routing.method == _METHODS.index("sparse_mixer") and k != 2:
        raise InvalidArgument(f"k is {k}, but method='sparse_mixer' chooses 2 experts; pass k=2")
    one_each = groups > 1 and experts == groups
    if one_each and routing.group_score == _GROUP_SCORES.index("sum_top_two"):
        raise InvalidArgument(
            f"groups is {groups}, so that each has one expert, but group_score='sum_top_two' adds up two; "
            "pass fewer groups, or group_score='max'"
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
        A tensor of torch or an array of numpy. On a GPU a tensor of torch, also bfloat16 or float16,
        whose rows are contiguous. A NaN is never chosen.
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
        For tensors on a GPU that the library does not run on, and if a gradient is asked for.
    """
    _arrays.refuse_gradient(logits, correction_bias)
    fields = tuple((name, value, type(value)) for name, value in routing.items())
    try:
        c_routing = _described(fields, correction_bias is not None)
    except TypeError:  # a value that cannot be hashed is none that a field can have
        c_routing = _described.__wrapped__(fields, correction_bias is not None)
    try:
        described, keep = _arrays.describe("logits", logits)
    except DTypeMismatch:
        raise DTypeMismatch(f"logits are {_arrays.dtype_name(logits.dtype)}; pass float32") from None
    cuda = described.device_type == _abi.CUDA
    if described.dtype != _abi.F32 and not (cuda and described.dtype in (_abi.BF16, _abi.F16)):
        types = "float32, bfloat16 or float16" if cuda else "float32"
        raise DTypeMismatch(f"logits are {_arrays.DTYPE_NAMES[described.dtype]}; pass {types}")
    shape_of_logits = _arrays.shape_of(described)
    if len(shape_of_logits) != 2:
        raise ShapeMismatch(f"logits are {shape_of_logits}; pass [T, E]")
    _check_choice(k, described.shape[1], c_routing)
    shape = (described.shape[0], k)
    ids = _arrays.empty(logits, "logits", shape, "int32") if ids_out is None else ids_out
    weights = _arrays.empty(logits, "logits", shape, "float32") if weights_out is None else weights_out
    call = _abi.TopkCall(top_k=k, routing=ctypes.pointer(c_routing), logits=described)
    kept = [keep]
    for field, name, array, needed, dtype in (
        ("ids", "ids_out", ids, shape, _abi.I32),
        ("weights", "weights_out", weights, shape, _abi.F32),
        ("correction_bias", "correction_bias", correction_bias, shape_of_logits[1:], _abi.F32),
    ):
        if array is None:
            continue
        tensor, kept_too = _arrays.describe(name, array, write=field != "correction_bias")
        if _arrays.shape_of(tensor) != needed:
            raise ShapeMismatch(f"{name} is {_arrays.shape_of(tensor)}; pass {needed}")
        if tensor.dtype != dtype:
            raise DTypeMismatch(
                f"{name} is {_arrays.DTYPE_NAMES[tensor.dtype]}; pass {'int32' if dtype == _abi.I32 else 'float32'}"
            )
        _arrays.require_contiguous(name, tensor)
        _arrays.require_same_device(name, tensor, "logits", described)
        setattr(call, field, tensor)
        kept.append(kept_too)
    if cuda:
        call.stream = _arrays.current_stream(logits)
    check(library.sy_topk_run(byref(call)))
    _arrays.wrote(ids_out, weights_out)
    del kept
    return ids, weights
