"""Reads a whole MoE block of transformers: its router, experts and shared expert.

As with activations (_probe.py), no table of models says how a block routes. Its own forward() is run on
random tokens, what it hands to its experts is looked at, and the routing that Switchyard has is searched
for one that gives the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from . import _hf, _probe, _routing
from ._activation import Activation
from ._routing import Routing
from .errors import Error, Unsupported

_TOKENS = 64
# Of weights and outputs. In 16 bits logits round, and experts whose logits are alike change places.
_ROUTING_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_OUTPUT_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_MOST_CHANGED = 0.1


@dataclasses.dataclass
class Block:
    """What a block consists of."""

    found: _hf._Found
    router: torch.Tensor  # [E, H]
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    top_k: int
    routing: Routing
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # gate, up, down
    shared_sigmoid: torch.Tensor | None  # [H]
    x: torch.Tensor  # tokens that it was run on,
    out: torch.Tensor  # and what it made of them


def read(block: torch.nn.Module) -> Block:
    """The parts of a block.

    Raises
    ------
    Unsupported
        Naming the class and the attribute, or how it routes otherwise.
    """
    kind = type(block).__name__
    experts = getattr(block, "experts", None)
    if not isinstance(experts, torch.nn.Module) or not _hf._is_decorated(experts):
        raise Unsupported(
            f"{kind}.experts is {type(experts).__name__}; from_hf() takes blocks whose experts go through "
            "the interface of transformers 5: see python -m switchyard check-hf"
        )
    found = _hf._of_decorated(experts)
    used = [found.w13, found.w2, *(v for v in found.options.values() if isinstance(v, torch.Tensor))]

    gate = next((getattr(block, n) for n in ("gate", "router") if hasattr(block, n)), None)
    shape = (found.w13.shape[0], found.w2.shape[2 if found.options.get("transposed") else 1])
    router, router_bias = _router(gate, shape)
    if router is None:
        raise Unsupported(f"{kind} has no gate or router with a weight of {list(shape)}")
    correction = _named(block, ("e_score_correction_bias", "expert_bias"))
    used += [router, *(t for t in (router_bias, correction) if t is not None)]

    shared, sigmoid = _shared(block, kind, found.options["activation"], (gate, experts))
    used += [*(shared or ()), *(() if sigmoid is None else (sigmoid,))]
    known = {id(tensor) for tensor in used}
    for name, tensor in itertools.chain(block.named_parameters(), block.named_buffers()):
        if id(tensor) not in known:
            raise Unsupported(
                f"{kind}.{name} ({list(tensor.shape)}) is no part of a layer that Switchyard has: router, "
                "correction bias, experts, and one shared expert without biases"
            )

    x, ids, weights, out = _run(block, kind, router, found.w13.dtype)
    routing = _routing_of(block, gate, kind, x, ids, weights, router, router_bias, correction)
    return Block(
        found=found,
        router=router,
        router_bias=router_bias,
        correction_bias=None if correction is None else correction.view(-1),
        top_k=ids.shape[1],
        routing=routing,
        shared=shared,
        shared_sigmoid=None if sigmoid is None else sigmoid.view(-1),
        x=x,
        out=out,
    )


def _router(gate: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The weight of a gate, or of a module in it, and the bias beside it."""
    for module in gate.modules() if isinstance(gate, torch.nn.Module) else ():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and tuple(weight.shape) == shape:
            return weight, getattr(module, "bias", None)
    return None, None


def _named(block: torch.nn.Module, names: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor of one of these names, in the block or in a module of its router."""
    for name, tensor in itertools.chain(block.named_parameters(), block.named_buffers()):
        if name.rpartition(".")[2] in names and not name.startswith("experts."):
            return tensor
    return None


def _shared(
    block: torch.nn.Module, kind: str, activation: Activation, others: tuple[Any, ...]
) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
    """(gate, up, down) of a shared expert, and the weight of its sigmoid gate."""
    shared, sigmoid = None, None
    for name, child in block.named_children():
        if child in others:
            continue
        projections = [getattr(child, n, None) for n in ("gate_proj", "up_proj", "down_proj")]
        if all(isinstance(p, torch.nn.Linear) for p in projections) and shared is None:
            if not _computes(child, projections, activation):
                raise Unsupported(
                    f"{kind}.{name} ({type(child).__name__}) does not compute down(act(gate, up)) with the "
                    f"experts' {activation}; Switchyard has one activation for both"
                )
            shared = tuple(p.weight for p in projections)
        elif isinstance(child, torch.nn.Linear) and child.out_features == 1 and child.bias is None:
            sigmoid = child.weight
    if shared is None and sigmoid is not None:
        raise Unsupported(f"{kind} has a gate for a shared expert, but no gate_proj, up_proj and down_proj")
    return shared, sigmoid


def _computes(mlp: torch.nn.Module, projections: list[Any], activation: Activation) -> bool:
    """Whether a shared expert has this activation, asked where its limits would show."""
    gate, up, down = (p.weight.float() for p in projections)
    dtype = projections[0].weight.dtype
    spread = max(gate.norm(dim=1).mean().item(), 1e-20)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_TOKENS, gate.shape[1], generator=generator) * (8 / spread)
    x = x.to(gate.device, dtype)
    hidden = _probe.apply(activation, x.float() @ gate.T, x.float() @ up.T)
    if any(projection.bias is not None for projection in projections):
        return True  # The biases are refused, by name, as no part of a layer.
    expected, actual = hidden @ down.T, mlp(x[None])[0].float()
    return ((actual - expected).norm() <= _OUTPUT_ERROR.get(dtype, 0.1) * expected.norm()).item()


def _run(
    block: torch.nn.Module, kind: str, router: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, what the block handed to its experts for them, and its output."""
    dtype = dtype if dtype in _ROUTING_ERROR else torch.bfloat16
    spread = router.detach().float().norm(dim=1).mean().item()
    if not spread > 0 or not math.isfinite(spread):
        raise Unsupported(f"{kind}: the router's weights are all 0, or not finite; load the weights first")
    generator = torch.Generator().manual_seed(0)
    # Logits of a few units: far enough apart for all scores to differ, and none vanishes.
    x = torch.randn(_TOKENS, router.shape[1], generator=generator) * (2 / spread)
    x = x.to(router.device, dtype)
    seen: list[Any] = []

    def look(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.extend((*arguments, *named.values()))

    hook = block.experts.register_forward_pre_hook(look, with_kwargs=True)
    training = block.training
    try:
        block.eval()
        out = block(x[None].clone())
    finally:
        block.train(training)
        hook.remove()
    out = out[0] if isinstance(out, tuple) else out
    tensors = [t for t in seen if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[0] == _TOKENS]
    ids = [t for t in tensors if not t.is_floating_point()]
    rest = [t for t in tensors if t.is_floating_point()]
    tokens = [t for t in rest if t.shape == x.shape and torch.equal(t, x)]
    weights = [t for t in rest if ids and t.shape == ids[0].shape and t is not (tokens or [None])[0]]
    if not (ids and tokens and weights):
        shapes = ", ".join(str(list(t.shape)) for t in tensors) or "nothing of these tokens"
        raise Unsupported(
            f"{kind} does not hand its tokens as they are, with ids and weights [T, K], to its experts, but "
            f"{shapes}"
        )
    return x, ids[0], weights[0], out.reshape(x.shape)


def _dense(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, E] of ids and weights [T, K]."""
    return torch.zeros(ids.shape[0], experts).scatter_(1, ids.cpu().long(), weights.float().cpu())


def _candidates(block: Any, gate: Any, has_correction: bool) -> Iterator[Routing]:
    """Likely ones first: where several give the same, the first is taken."""

    def attribute(*names: str) -> Any:
        for holder in (gate, block):
            for name in names:
                value = getattr(holder, name, None)
                if value is not None:
                    return value
        return None

    groups = int(attribute("num_group", "n_group", "num_expert_group") or 1)
    top_groups = int(attribute("topk_group", "top_k_group") or 1)
    grouped = [(groups, top_groups)] if groups > 1 else []
    for (number, top), renormalize, before, score, group_score in itertools.product(
        [*grouped, (1, 1)],
        (True, False),
        (False, True),
        ("sigmoid", "softmax", "sqrt_softplus") if has_correction else ("softmax", "sigmoid", "sqrt_softplus"),
        ("sum_top_two", "max"),
    ):
        if number > 1 or group_score == "sum_top_two":
            yield Routing(
                score=score,
                top_k_before_score=before,
                renormalize=renormalize,
                groups=number,
                top_groups=top,
                group_score=group_score,
            )
    jitter = attribute("router_jitter_noise")
    if jitter is not None and not has_correction:
        yield Routing(method="sparse_mixer", jitter_eps=float(jitter))


def _routing_of(
    block: Any,
    gate: Any,
    kind: str,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    correction: torch.Tensor | None,
) -> Routing:
    logits = x.detach().float().cpu() @ router.detach().float().cpu().T
    if router_bias is not None:
        logits += router_bias.detach().float().cpu()
    bias = None if correction is None else correction.detach().float().cpu().reshape(-1).contiguous()
    expected = _dense(ids, weights, router.shape[0])
    bound = _ROUTING_ERROR[x.dtype]
    nearest, least = None, math.inf
    for candidate in _candidates(block, gate, bias is not None):
        options = dataclasses.asdict(candidate)
        try:
            found = _routing.topk(logits.contiguous(), ids.shape[1], correction_bias=bias, **options)
        except Error:  # groups that do not fit are none of this block's
            continue
        actual = _dense(found[0].clamp(min=0), found[1] * (found[0] >= 0), router.shape[0])
        # The median: tokens whose experts changed places must not count.
        ratio = (expected.sum(1) / actual.sum(1)).median().item()
        scale = _probe._rounded(ratio)
        scale = 1.0 if abs(scale - 1) < bound else scale
        errors = (expected - scale * actual).norm(dim=1) / expected.norm(dim=1)
        wrong = (~(errors < bound)).float().mean().item()
        if wrong <= (0 if x.dtype == torch.float32 else _MOST_CHANGED):
            return dataclasses.replace(candidate, scale=scale)
        if wrong < least:
            nearest, least = candidate, wrong
    raise Unsupported(
        f"{kind} routes as Switchyard cannot: the nearest is {nearest}, which differs for "
        f"{least:.0%} of {_TOKENS} tokens"
    )


def compare(kind: str, block: Block, out: torch.Tensor) -> None:
    """Raise `Unsupported` unless a layer makes of the tokens what the block did."""
    expected, actual = block.out.detach().float(), out.detach().float()
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-20)
    bound = _OUTPUT_ERROR[block.x.dtype]
    if block.found.w13.element_size() == 1:
        bound = 0.1  # both products' activations are rounded to e4m3
    wrong = (~(errors < bound)).float().mean().item()
    if wrong > (0 if block.x.dtype == torch.float32 else _MOST_CHANGED):
        raise Unsupported(
            f"{kind} does more than router, experts and shared expert: of {_TOKENS} tokens {wrong:.0%} come "
            f"out otherwise, by {errors.median().item():.1e} of their norm. check=False takes it all the same"
        )
