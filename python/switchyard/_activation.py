"""What stands between the two products of an expert."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from . import _abi
from ._values import MOST_COUNT, is_flag
from .errors import InvalidArgument

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity", "situ")


def is_real(value: object) -> bool:
    """Whether a value is a number, of Python or numpy; NaN and infinity are."""
    return isinstance(value, numbers.Real) and not is_flag(value)


def is_whole(value: object) -> bool:
    """Whether a value is an integer, of Python or numpy."""
    return isinstance(value, numbers.Integral) and not is_flag(value)


def count_words(value: Any, least: int) -> str:
    """What a count may be, by the bound that a value crossed."""
    if is_whole(value) and value > MOST_COUNT:
        return f"an int of at most {MOST_COUNT}"
    return f"an int of at least {least}"


@dataclasses.dataclass(frozen=True)
class Activation:
    """The activation of an expert's feed-forward network.

    Gated: ``h = f(min(g, limit)) * (clamp(u, -limit, limit) + up_bias)``. Plain: ``h = f(u)``.
    ``"situ"`` bends where others clamp: ``h = f(g) * (limit * tanh(u / limit) + up_bias)``.

    Parameters
    ----------
    kind : str
        ``"silu"`` (``v * sigmoid(alpha * v)``), ``"gelu"`` (with erf), ``"gelu_tanh"``, ``"relu"``,
        ``"relu2"``, ``"identity"`` or ``"situ"`` (``alpha * tanh(v / alpha) * sigmoid(v)``, with a gate).
    gated : bool
        SwiGLU, GeGLU and so on; False: one projection and no product.
    alpha : float
        Factor inside ``"silu"`` (GPT-OSS: 1.702), or what ``"situ"`` tends to (Kimi-K3: 4).
    limit : float
        Clamps gate and up. GPT-OSS: 7, DeepSeek-V4: 10; of ``"situ"``, Kimi-K3: 25.
    up_bias : float
        Added to up. GPT-OSS: 1.

    Raises
    ------
    InvalidArgument
        For a kind that is none of these, a number that is none or out of its range, or one that the
        kind has no use for: alpha without ``"silu"`` or ``"situ"``, limit and up_bias without a gate, and
        ``"situ"`` without one.
    """

    kind: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = math.inf
    up_bias: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise InvalidArgument(
                f"activation kind {self.kind!r} is not known; use one of {', '.join(KINDS)}"
            )
        if not is_flag(self.gated):
            raise InvalidArgument(f"activation gated is {self.gated!r}; pass True or False")
        for name in ("alpha", "limit", "up_bias"):
            value = getattr(self, name)
            if not is_real(value):
                raise InvalidArgument(f"activation {name} is {value!r}; pass a number")
            object.__setattr__(self, name, float(value))
        if not (0 < self.alpha < math.inf):
            raise InvalidArgument(
                f"activation alpha is {self.alpha}; pass a finite number above 0 (1: plain SiLU)"
            )
        if self.alpha != 1 and self.kind not in ("silu", "situ"):
            raise InvalidArgument(
                f"activation alpha is {self.alpha}, but only silu and situ have one, not {self.kind}; leave it at 1"
            )
        if self.kind == "situ" and not self.gated:
            raise InvalidArgument("activation gated is False, but situ has a gate; pass gated=True")
        if not self.limit > 0:
            raise InvalidArgument(
                f"activation limit is {self.limit}; pass a number above 0, or math.inf for no limit"
            )
        if not math.isfinite(self.up_bias):
            raise InvalidArgument(f"activation up_bias is {self.up_bias}; pass a finite number")
        if not self.gated and (self.limit != math.inf or self.up_bias != 0):
            name, value = ("limit", self.limit) if self.limit != math.inf else ("up_bias", self.up_bias)
            raise InvalidArgument(
                f"activation {name} is {value}, but without a gate there is none; leave it out, or pass "
                "gated=True"
            )

    def _to_c(self) -> _abi.Activation:
        return _abi.Activation(
            KINDS.index(self.kind), int(self.gated), self.alpha, self.limit, self.up_bias
        )

    @classmethod
    def _from_c(cls, c: _abi.Activation) -> Activation:
        return cls(KINDS[c.kind], bool(c.gated), c.alpha, c.limit, c.up_bias)


def require_activation(activation: object) -> None:
    """Raise `InvalidArgument` for what is no `Activation`."""
    if isinstance(activation, Activation):
        return
    known = isinstance(activation, str) and activation in KINDS
    raise InvalidArgument(
        f"activation is {activation!r}; pass switchyard.Activation({activation if known else 'silu'!r})"
    )
