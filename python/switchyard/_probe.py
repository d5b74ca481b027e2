"""Finds out what activation a module of somebody else's applies, by asking it.

A table of models would be wrong for the next one, and silently so. A module's own function is called
with gates and ups of known values; from a few answers follow kind, alpha, limit and bias; and on
thousands of others, small and large and of all signs, the activation that was found must give what the
module gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ._activation import Activation
from .errors import InvalidArgument, Unsupported

# Whatever torch's defaults are set to.
_HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
# Of fp32, over the few operations of an activation.
_TOLERANCE = 3e-5
_FAR = 1e4
# Magnitudes, of which both signs are tried: small ones, those beside the limits of published models (5 to 30), and
# some far beyond, where a soft limit or one on one side only shows.
_MAGNITUDES = (
    *(0.0, 1e-4, 0.01, 0.1, 0.3, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 4.9, 5.1, 6.9, 7.1, 9.9, 10.1, 13.0, 17.0, 19.9),
    *(20.1, 25.1, 30.1, 40.0, 60.0, 90.0, 110.0, 200.0, 500.0, 1e3, 3e3, _FAR),
)


def apply(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """h, as the library computes it: see `Activation`."""
    limit = activation.limit
    if activation.kind == "situ":
        up = up if limit == math.inf else limit * torch.tanh(up / limit)
    else:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _f(activation.kind, activation.alpha, gate) * (up + activation.up_bias)


def _f(kind: str, alpha: float, v: torch.Tensor) -> torch.Tensor:
    if kind == "silu":
        return v * torch.sigmoid(alpha * v)
    if kind == "situ":
        return alpha * torch.tanh(v / alpha) * torch.sigmoid(v)
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


def _values(device: Any) -> torch.Tensor:
    magnitudes = torch.tensor(_MAGNITUDES, **_HOST)
    return torch.cat((-magnitudes, magnitudes)).to(device)


def _pairs(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups: random ones, and every known value with every other."""
    generator = torch.Generator("cpu").manual_seed(0)
    gate, up = (torch.randn(2, 512, generator=generator, **_HOST) * 4).to(device)
    values = _values(device)
    gates, ups = torch.meshgrid(values, values, indexing="ij")
    return torch.cat((gate, gates.flatten())), torch.cat((up, ups.flatten()))


def slack(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What rounding may change: an activation far below 0 is a small difference of large terms."""
    return 3e-7 * (gate * up).abs().nan_to_num()


def alike(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Whether values are the same but for rounding, and NaN where the others are."""
    near = (actual - expected).abs() <= allowed + 1e-5 * expected.abs()
    return (near | (actual.isnan() & expected.isnan())).all().item()


def _error(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> float:
    beyond = ((actual - expected).abs() - allowed).clamp(min=0)
    return (beyond / expected.abs().clamp(min=1)).max().item()


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
        values = torch.tensor([[gate], [up]], **_HOST).to(device)
        return apply_gate(values[0], values[1]).item()

    slope = (at(1, 0.25) - at(1, 0)) / 0.25
    if abs(slope) < 1e-6 or not math.isfinite(slope):
        raise Unsupported(f"{name}: the output at gate 1 does not depend on up: no gated activation")
    up_bias = _rounded(at(1, 0) / slope) if abs(at(1, 0)) > 1e-6 else 0.0
    highest = at(1, _FAR) / slope - up_bias
    limit = math.inf if highest > 0.99 * _FAR else _rounded(highest)
    gate, up = _pairs(device)
    expected = apply_gate(gate, up)

    def bends() -> list[tuple[str, bool, float, float, float]]:
        """Arguments of SiTU, in which up is a line near 0 alone."""
        step = 0.01
        slope, steepest = ((at(gate, step) - at(gate, -step)) / (2 * step) for gate in (1, _FAR))
        if slope == 0:
            return []
        bias = _rounded(at(1, 0) / slope) if abs(at(1, 0)) > 1e-6 else 0.0
        highest = at(1, _FAR) / slope - bias
        return [("situ", True, _rounded(steepest), math.inf if highest > 0.99 * _FAR else _rounded(highest), bias)]

    def error_of(activation: Activation) -> float:
        return _error(apply(activation, gate, up), expected, slack(gate, up))

    clamps = [(kind, True, alpha, limit, up_bias) for kind, alpha in _candidates(slope)]
    best = _nearest(name, clamps + bends(), error_of)
    for words, values in (("gate", (math.nan, 1)), ("up", (1, math.nan))):
        if not math.isnan(at(*values)):
            raise Unsupported(
                f"{name}: its activation gives {at(*values)} where {words} is NaN; Switchyard's give NaN, which "
                "would otherwise be hidden from whoever looks for it"
            )
    return best


def _nearest(
    name: str,
    candidates: list[tuple[Any, ...]],
    error_of: Callable[[Activation], float],
) -> Activation:
    """The activation of these arguments that gives what the module gives."""
    errors = {}
    for given in candidates:
        try:
            activation = Activation(*given)
        except InvalidArgument:  # numbers that no activation of this kind has
            continue
        errors[activation] = error_of(activation)
    if not errors:
        raise Unsupported(f"{name}: its activation is none that Switchyard has")
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
    v, _ = _pairs(device)
    expected = f(v)
    f1 = f(torch.ones(1, **_HOST).to(device)).item()
    best = _nearest(
        name,
        [(kind, False, alpha) for kind, alpha in _candidates(f1)],
        lambda activation: _error(_f(activation.kind, activation.alpha, v), expected, slack(v, torch.ones_like(v))),
    )
    if not f(torch.full((1,), math.nan, **_HOST).to(device)).isnan().item():
        raise Unsupported(f"{name}: its activation hides NaN, which Switchyard's do not")
    return best
