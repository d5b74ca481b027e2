"""The all-to-all problem of GPU MODE: its cases, its data, and what must come out.

Every rank has tokens and, for each, K of E experts with weights. A token goes to the ranks of its
experts, experts make something of it, and the token's rank sums up what comes back:

    y[t] = sum over k of weights[t, k] * expert(x[t])        in fp16

Experts are stand-ins, so that only the way there and back is measured: a rank multiplies what it
gets by 1 + its number, or each expert multiplies by a random weight of its own. What must come out
can then be computed by every rank alone, from its own tokens.
"""

from __future__ import annotations

import dataclasses

import torch

RTOL, ATOL = 1e-2, 5e-3


@dataclasses.dataclass(frozen=True)
class Config:
    """E, K, H, and the most tokens of a rank. All are in fp16."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    max_num_tokens: int

    def local_experts(self, world: int) -> int:
        return self.num_experts // world


@dataclasses.dataclass(frozen=True)
class Case:
    config: Config
    seed: int
    # With 8 MI300X: bytes over the links' rate, in microseconds; of benchmarks only.
    speed_of_light_us: float | None = None

    def __str__(self) -> str:
        c = self.config
        return (
            f"E {c.num_experts}, K {c.experts_per_token}, H {c.hidden_dim}, "
            f"up to {c.max_num_tokens} tokens, seed {self.seed}"
        )


TESTS = [
    Case(Config(8, 2, 6144, 4), 1236),
    Case(Config(64, 6, 2048, 4), 1234),
    Case(Config(64, 6, 2048, 8), 542),
    Case(Config(128, 4, 2880, 16), 347),
    Case(Config(128, 4, 2880, 32), 51),
    Case(Config(128, 8, 4096, 64), 175),
    Case(Config(128, 8, 4096, 128), 534),
    Case(Config(256, 8, 7168, 64), 897),
    Case(Config(256, 8, 7168, 128), 4),
]
BENCHMARKS = [
    Case(Config(8, 2, 6144, 16), 6635, 6.33),
    Case(Config(64, 6, 2048, 32), 1234, 7.37),
    Case(Config(128, 4, 2880, 128), 51, 14.98),
    Case(Config(128, 8, 4096, 256), 175, 61.78),
    Case(Config(256, 8, 7168, 256), 4, 104.36),
]
CASES = TESTS + BENCHMARKS


@dataclasses.dataclass
class RankData:
    """A rank's part of a case."""

    num_tokens: int
    indices: torch.Tensor  # [T, K], int32, distinct within a token
    weights: torch.Tensor  # [T, K], float32
    x: torch.Tensor  # [T, H], float16
    # [local experts], float32: what each of this rank's experts multiplies by. None: 1 + rank.
    expert_weights: torch.Tensor | None = None


def make_rank_data(
    case: Case, rank: int, world: int, *, random_experts: bool = False, device: str = "cpu"
) -> RankData:
    config = case.config
    generator = torch.Generator().manual_seed(case.seed + rank)
    tokens = int(torch.randint(1, config.max_num_tokens, (), generator=generator))
    scores = torch.rand(tokens, config.num_experts, generator=generator)
    indices = scores.argsort(dim=1)[:, : config.experts_per_token].to(torch.int32)
    weights = torch.rand(tokens, config.experts_per_token, generator=generator)
    x = torch.randn(tokens, config.hidden_dim, generator=generator).half()
    local = None
    if random_experts:
        each = config.local_experts(world)
        local = expert_factors(case, world, True)[rank * each : (rank + 1) * each].float().to(device)
    return RankData(tokens, indices.to(device), weights.to(device), x.to(device), local)


def expert_factors(case: Case, world: int, random_experts: bool) -> torch.Tensor:
    """[E], float64: what each expert multiplies by."""
    experts = torch.arange(case.config.num_experts)
    if not random_experts:
        return 1.0 + torch.div(experts, case.config.local_experts(world), rounding_mode="floor").double()
    generator = torch.Generator().manual_seed(case.seed + 1_000_003)
    return (torch.rand(case.config.num_experts, generator=generator) * 2 - 1).double()


def reference(case: Case, data: RankData, world: int, random_experts: bool) -> torch.Tensor:
    """[T, H], float64: experts' results are rounded to fp16, everything else is exact."""
    factors = expert_factors(case, world, random_experts)
    x, indices, weights = data.x.cpu().double(), data.indices.cpu().long(), data.weights.cpu().double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for k in range(case.config.experts_per_token):
        result = (x * factors[indices[:, k], None]).half().double()
        out += weights[:, k, None] * result
    return out


def largest_fault(case: Case, data: RankData, y: torch.Tensor, world: int, random_experts: bool) -> float:
    """The largest difference, as a part of the problem's tolerance: up to 1 is right."""
    expected = reference(case, data, world, random_experts)
    if y.shape != expected.shape or y.dtype != torch.float16:
        return float("inf")
    allowed = ATOL + RTOL * expected.abs()
    return float(((y.cpu().double() - expected).abs() / allowed).max())
