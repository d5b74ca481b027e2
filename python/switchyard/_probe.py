"""Finds out what activation a module of somebody else's applies, by asking it.

A table of models would be wrong for the next one, and silently so. A module's own function is called
with gates and ups of known values; from a few answers follow kind, alpha, limit and bias; and on
hundreds of others the activation that was found must give what the module gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ._activation import Activation
from .errors import Unsupported

# Of fp32, over the few operations of an activation.
_TOLERANCE = 3e-5
_FAR = 1e4


def apply(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """h, as the library computes it: see `Activation`."""
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return _f(activation.kind, activation.alpha, gate) * (up + activation.up_bias)


def _f(kind: str, alpha: float, v: torch.Tensor) -> torch.Tensor:
    if kind == "silu":
        return v * torch.sigmoid(alpha * v)
    if kind == "gelu":
        return torch.nn.functional.gelu(v)
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(v, approximate="tanh")
    if kind == "relu":
        return v.clamp(min=0)
    if kind == "relu2":
        return v.clamp(min=0).square()
    return v


def _rounded(value: float) -> float:
    """The short number that somebody wrote, from what fp32 made of it."""
    short = float(f"{value:.4g}")
    return short if abs(short - value) <= 1e-4 * abs(value) else value


def _candidates(f1: float) -> list[tuple[str, float]]:
    """Kinds, and for SiLU the alpha that follows from f(1) = sigmoid(alpha)."""
    found = [(kind, 1.0) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")]
    if 1e-3 < f1 < 1 - 1e-3:
        found.append(("silu", _rounded(math.log(f1 / (1 - f1)))))
    return found


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs() / expected.abs().clamp(min=1)).max().item()


def gated(
    name: str, apply_gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: Any
) -> Activation:
    """The activation that a function of gates [n] and ups [n], fp32, computes.

    Raises
    ------
    Unsupported
        If it is none that Switchyard has.
    """

    def at(gate: float, up: float) -> float:
        return apply_gate(
            torch.tensor([float(gate)], device=device), torch.tensor([float(up)], device=device)
        ).item()

    slope = (at(1, 0.25) - at(1, 0)) / 0.25
    if abs(slope) < 1e-6 or not math.isfinite(slope):
        raise Unsupported(f"{name}: the output at gate 1 does not depend on up: no gated activation")
    up_bias = _rounded(at(1, 0) / slope) if abs(at(1, 0)) > 1e-6 else 0.0
    highest = at(1, _FAR) / slope - up_bias
    limit = math.inf if highest > 0.99 * _FAR else _rounded(highest)
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 512, generator=generator) * 4).to(device)
    # Some beyond any limit.
    gate[::17] *= 20
    up[::13] *= 20
    expected = apply_gate(gate, up)
    errors = {}
    for kind, alpha in _candidates(slope):
        activation = Activation(kind, True, alpha, limit, up_bias)
        errors[activation] = _error(apply(activation, gate, up), expected)
    best = min(errors, key=lambda activation: errors[activation])
    if not errors[best] <= _TOLERANCE:
        raise Unsupported(
            f"{name}: its activation is none that Switchyard has; the nearest is {best}, which differs "
            f"by {errors[best]:.1e} of the larger of 1 and the value"
        )
    return best


def plain(
    name: str, f: Callable[[torch.Tensor], torch.Tensor], device: Any
) -> Activation:
    """The activation without a gate that a function of [n], fp32, computes.

    Raises
    ------
    Unsupported
        If it is none that Switchyard has.
    """
    v = (torch.randn(512, generator=torch.Generator().manual_seed(0)) * 4).to(device)
    expected = f(v)
    f1 = f(torch.ones(1, device=device)).item()
    errors = {
        Activation(kind, False, alpha): _error(_f(kind, alpha, v), expected)
        for kind, alpha in _candidates(f1)
    }
    best = min(errors, key=lambda activation: errors[activation])
    if not errors[best] <= _TOLERANCE:
        raise Unsupported(
            f"{name}: its activation is none that Switchyard has; the nearest is {best}, which differs "
            f"by {errors[best]:.1e} of the larger of 1 and the value"
        )
    return best
