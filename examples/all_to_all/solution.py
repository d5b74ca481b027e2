"""The problem's function, through `switchyard.Exchange`."""

from __future__ import annotations

import threading
from typing import Any

import torch

import switchyard
from problem import Config, RankData

# Ranks may be threads of one process.
_own = threading.local()


def use(world: switchyard.World) -> None:
    """The world of this thread's rank, where it is not that of torch.distributed or a launcher."""
    _own.world = world
    _own.exchanges = {}


def _world() -> switchyard.World:
    if not hasattr(_own, "world"):
        import torch.distributed as dist

        grouped = dist.is_available() and dist.is_initialized()
        use(switchyard.World.from_process_group() if grouped else switchyard.World.from_env())
    return _own.world


def exchange_of(config: Config, device: torch.device, layout: Any) -> switchyard.Exchange:
    """Made once for each shape: making one is collective, and allocates."""
    key = (config, str(device), layout)
    found = _own.exchanges.get(key)
    if found is None:
        found = _own.exchanges[key] = switchyard.Exchange(
            _world(),
            hidden=config.hidden_dim,
            num_experts=config.num_experts,
            top_k=config.experts_per_token,
            max_tokens=config.max_num_tokens,
            dispatch="fp16",
            layout=layout,
            device=device,
        )
    return found


def experts(got: switchyard.Received, data: RankData, rank: int) -> torch.Tensor:
    """The stand-ins, in place."""
    if data.expert_weights is None:
        return got.rows.mul_(1 + rank)
    factors = data.expert_weights
    if got.layout == "packed":
        # Rows stand one behind the other, expert by expert; there are no others.
        return got.rows.mul_(factors.repeat_interleave(got.counts)[:, None])
    return got.by_expert.mul_(factors[:, None, None])


def custom_kernel(data: tuple[Config, RankData, int, int], *, padded: bool = False) -> torch.Tensor:
    """One rank's tokens there and back: y [num_tokens, H], fp16.

    Rows are packed: the host reads how many there are. `padded`: they stand in
    [local experts, max · world, H], as in the problem's own dispatch, and the host reads nothing.
    """
    config, mine, rank, world_size = data
    world = _world()
    assert (world.rank, world.size) == (rank, world_size)
    exchange = exchange_of(config, mine.x.device, ("padded", 0) if padded else "packed")
    got = exchange.dispatch(mine.x, mine.indices, mine.weights, exact=not padded)
    return exchange.combine(experts(got, mine, rank), got.handle)
