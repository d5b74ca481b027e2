"""A user's file, which `mypy --strict` checks: test_typing.py runs it, and asks that every public name is in it.

It is not run: functions have the arguments that they need.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import switchyard
from switchyard import tuner

Floats = npt.NDArray[np.float32]


class Layer(torch.nn.Module):
    """A model's module around a layer."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor, workspace: switchyard.Workspace) -> None:
        super().__init__()
        self.experts = switchyard.Experts(
            w13, w2, top_k=8,
            activation=switchyard.Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0),
            order="interleaved",
            routing=switchyard.Routing(score="sigmoid", renormalize=True, groups=8, top_groups=4),
            memory=switchyard.Memory(workspace), numerics=switchyard.Numerics(bad_ids="skip"),
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, ids, weights, scale=2.5)

    def by_logits(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self.experts.from_logits(x, logits)

    def changed(self, w13: torch.Tensor, w2: torch.Tensor) -> switchyard.Stats:
        self.experts.rebind(w13, w2)
        self.experts.refresh()
        self.experts.check()
        return self.experts.stats()

    def close(self) -> bool:
        self.experts.close()
        return self.experts.closed


def of_numpy(x: Floats, w13: Floats, w2: Floats, ids: npt.NDArray[np.int32], weights: Floats) -> Floats:
    return switchyard.experts(x, w13, w2, ids, weights, top_k=2)


def whole_layers(path: pathlib.Path, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    first = switchyard.MoeLayer.from_checkpoint(path, 3, device="cpu", compute="bf16")
    second = switchyard.MoeLayer.from_hf(block)
    routing: switchyard.Routing | None = second.routing
    if routing is None:
        return first.forward(x)
    second.check()
    second.refresh()
    epochs: int = second.stats().epoch
    trace: dict[str, Any] = second.trace()
    recording: dict[str, Any] = second.recording()
    tuner.write_recordings("routing.json", [recording])
    print(epochs, trace, second.extra_repr(), routing.score)
    second.close()
    return first(x)


def operators(x: torch.Tensor, w: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    ids, weights = switchyard.topk(logits, 8, score="softmax")
    order: switchyard.Permutation = switchyard.permute(ids, 64, ("blocked", 128))
    schedule = switchyard.GroupedSchedule(tile_rows=64, stages=4, paired=True, band=1, splits=2)
    rows = switchyard.grouped_gemm(x, w, order.ends, layout=order.layout, index=order.tokens, schedule=schedule)
    gemm = switchyard.GroupedGemm(w, activation=switchyard.Activation("gelu", gated=False), table=pathlib.Path("t.json"))
    rows = gemm(rows, order.ends)
    gemm.refresh()
    gemm.close()
    print(order.dropped, gemm.closed, schedule.tile_rows, schedule.stages, schedule.paired, schedule.band, schedule.splits)
    return switchyard.unpermute(rows, order.positions, weights)


def dispatch_and_combine(world: switchyard.World, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    exchange = switchyard.Exchange(world, hidden=4096, num_experts=64, top_k=8, max_tokens=128, layout=("padded", 0))
    handle: switchyard.ExchangeHandle = exchange.make_handle()
    got: switchyard.Received = exchange.dispatch(x, ids, weights, handle=handle)
    handle = exchange.dispatch_send(x, ids, weights)
    got = exchange.dispatch_recv(handle, exact=True)
    results: torch.Tensor = got.by_expert
    exchange.combine_send(results, got.handle)
    again: torch.Tensor = exchange.combine_recv(got.handle)
    stats: switchyard.ExchangeStats = exchange.stats()
    exchange.check()
    print(stats.dispatches, exchange.trace(), exchange.closed, handle.closed, again)
    handle.close()
    out = exchange.combine(got.rows.float(), got.handle, out=x)
    exchange.close()
    summed: torch.Tensor = out
    return summed


def heaps(world: switchyard.World) -> torch.Tensor:
    heap = switchyard.SymmetricHeap(world, 1 << 20, device="cpu", arrays="torch")
    inbox: torch.Tensor = heap.empty((world.size, 64), torch.float32)
    flag: torch.Tensor = heap.empty(1, torch.int64)
    there = heap.translate(inbox, (world.rank + 1) % world.size)
    heap.signal(flag, 1)
    heap.wait(flag, 1, 0)
    heap.barrier()
    heap.check()
    stats: switchyard.HeapStats = heap.stats()
    places: switchyard.PeerMap = heap.peer_map
    heap.free(inbox)
    heap.reset()
    heap.close()
    print(stats.bytes_allocated, places.bases, bytes(places), places.struct, heap.closed)
    return there


class Arena:
    """An allocator of one's own."""

    def allocate(self, bytes: int, /) -> int:
        return bytes

    def free(self, address: int, /) -> None:
        del address


def options(workspace: switchyard.Workspace, world: switchyard.World) -> dict[str, object]:
    numerics = switchyard.Numerics(
        compute="bf16", weight_on_input=True, capacity_factor=1.25, capacity_rule="tokens",
        bad_ids="raise", large_ids_are_none=True, pre_sum_per_host=False,
    )
    placement = switchyard.Placement(
        world=world, num_experts=64, experts=list(range(64)), device=0, reserved_sms=8, num_threads=0
    )
    memory = switchyard.Memory(workspace=workspace, slot=1)
    diagnostics = switchyard.Diagnostics(deadline=2.0, trace=True, recorded_steps=8, name="layers.3")
    return dict(numerics=numerics, placement=placement, memory=memory, diagnostics=diagnostics)


def workspaces(allocator: switchyard.DeviceAllocator) -> bool:
    with switchyard.Workspace(
        hidden=2048, intermediate=768, experts=128, top_k=8, max_tokens=64, compute=torch.bfloat16, allocator=allocator
    ) as workspace:
        workspace.release()
        workspace.restore()
    workspace.close()
    return workspace.released or workspace.closed


def worlds(group: torch.distributed.ProcessGroup) -> list[switchyard.World]:
    first = switchyard.World.from_env(deadline=10.0)
    own: range = first.own_experts(64)
    first.barrier()
    first.abort()
    first.close()
    print(own, first.closed, first.rank, first.size, first.fabric)
    others = [
        switchyard.World.single(),
        switchyard.World.processes(0, 2, rendezvous="tcp://node1:29000"),
        switchyard.World.from_process_group(group),
    ]
    return others + switchyard.World.threads(2)


def frameworks(model: torch.nn.Module) -> list[str]:
    switchyard.register_with_transformers(max_tokens=4096)
    return switchyard.patch(model, partial=True)


def errors(x: torch.Tensor, layer: Layer) -> str:
    try:
        layer(x, x, x)
    except (switchyard.Timeout, switchyard.Aborted) as error:
        return f"{error.waiter} {error.peer} {error.phase} {error.epoch}"
    except (
        switchyard.CapacityExceeded, switchyard.DTypeMismatch, switchyard.InvalidArgument,
        switchyard.InvalidConfig, switchyard.InvalidFile, switchyard.MissingTensor,
        switchyard.OutOfMemory, switchyard.ShapeMismatch, switchyard.SpecMismatch,
        switchyard.SystemFailure, switchyard.Unsupported,
    ) as error:
        return error.code
    except switchyard.Error as error:
        return error.code
    return f"{switchyard.version()} {switchyard.__version__} {switchyard.has_cuda()}"


def activations(activation: switchyard.Activation, routing: switchyard.Routing) -> str:
    numbers: list[float] = [activation.alpha, activation.limit, activation.up_bias, routing.jitter_eps, routing.scale]
    whole: list[int] = [routing.groups, routing.top_groups]
    flags: list[bool] = [activation.gated, routing.renormalize, routing.top_k_before_score]
    print(numbers, whole, flags, routing.renormalize_epsilon, routing.group_score, routing.method)
    return activation.kind


def time_of(model: tuner.Model, configuration: tuner.Configuration, counts: list[int]) -> tuple[float, float]:
    own = configuration.blocks + configuration.group_m + configuration.splits + configuration.is_rule + model.unseen
    return float(sum(counts) + own), 0.01


def tuning(file: pathlib.Path) -> tuner.Configuration:
    configurations = [tuner.Configuration("rows=64", 64, 128, values={"rows": 64}), tuner.Configuration("rows=128", 128, 128)]
    kernel = tuner.Kernel("mine", 1, configurations, "this machine", 132, l2_bytes=50 << 20)
    counts: list[int] = tuner.draw_counts("distinct", 64, 8, 2, 0.9)

    def tell(progress: tuner.Progress) -> None:
        print(progress.done, progress.total)

    if tuner.profile(kernel, [tuner.Model("mine", 8, 2, 64, 64)], time_of, file, progress=tell):
        tuner.fit(file, "fit.json", form="experts")
    outcomes: list[tuner.Outcome] = tuner.evaluate(file)
    with_times = tuner.Selector(kernel, "fit.json")
    configuration, microseconds = with_times.predict("mine", counts)
    chosen = with_times.select("mine", counts)
    with_times.close()
    print(outcomes[0].regret, microseconds, with_times.closed, tuner.balancedness(counts), configuration)
    return chosen
