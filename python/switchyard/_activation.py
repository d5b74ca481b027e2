"""What stands between the two products of an expert."""

from __future__ import annotations

import dataclasses
import math

from . import _abi
from .errors import InvalidArgument

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")


@dataclasses.dataclass(frozen=True)
class Activation:
    """The activation of an expert's feed-forward network.

    Gated: ``h = f(min(g, limit)) * (clamp(u, -limit, limit) + up_bias)``. Plain: ``h = f(u)``.

    Parameters
    ----------
    kind : str
        ``"silu"`` (``v * sigmoid(alpha * v)``), ``"gelu"`` (with erf), ``"gelu_tanh"``, ``"relu"``,
        ``"relu2"`` or ``"identity"``.
    gated : bool
        SwiGLU, GeGLU and so on; False: one projection and no product.
    alpha : float
        Of ``"silu"`` only. GPT-OSS: 1.702.
    limit : float
        Clamps gate and up. GPT-OSS: 7, DeepSeek-V4: 10.
    up_bias : float
        Added to up. GPT-OSS: 1.

    Raises
    ------
    InvalidArgument
        For a kind that is none of these.
    """

    kind: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = math.inf
    up_bias: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(
                f"activation kind {self.kind!r} is not known; use one of {', '.join(KINDS)}"
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
