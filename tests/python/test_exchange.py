"""Exchange: dispatch and combine alone, over ranks that are threads and processes."""

import functools
import gc
import os
import subprocess
import sys
import weakref

import numpy
import pytest
import torch

from conftest import run_ranks
import switchyard
from switchyard import Exchange, World

E, H, K, M = 10, 136, 3, 12
# batch() has ids of E, for experts that are none.
exchange_of = functools.partial(Exchange, large_ids_are_none=True)


def batch(ranks, seed=0, tokens=None, dtype=torch.bfloat16):
    """Tokens, ids (some none) and weights of every rank."""
    generator = torch.Generator().manual_seed(seed)
    x, ids, weights = [], [], []
    for r in range(ranks):
        t = tokens[r] if tokens else int(torch.randint(0, M + 1, (), generator=generator))
        x.append(torch.randn(t, H, generator=generator).to(dtype))
        chosen = torch.stack(
            [torch.randperm(E + 1, generator=generator)[:K] - 1 for _ in range(t)] or [torch.empty(0, K)]
        )
        ids.append(chosen.reshape(t, K).to(torch.int64))
        weights.append(torch.rand(t, K, generator=generator))
    return x, ids, weights


def rows_of(ids, expert):
    """(rank, token, k) of an expert, in their order."""
    return [
        (r, t, k)
        for r, of_rank in enumerate(ids)
        for t in range(of_rank.shape[0])
        for k in range(K)
        if int(of_rank[t, k]) == expert
    ]


def first_rows(layout, counts):
    rows, first = 0, []
    for e, count in enumerate(counts):
        if layout == "packed":
            first.append(rows)
            rows += count
        elif layout[0] == "blocked":
            first.append(rows)
            rows += -(-count // layout[1]) * layout[1]
        else:
            first.append(e * layout[1])
    return first


def check_received(got, exchange, x, ids, weights):
    expected = [rows_of(ids, e) for e in exchange.own_experts]
    assert [int(c) for c in got.counts] == [len(rows) for rows in expected]
    assert [int(end) for end in got.ends] == [
        sum(len(rows) for rows in expected[: e + 1]) for e in range(len(expected))
    ]
    assert int(got.num_rows[0]) == sum(len(rows) for rows in expected)
    packed = 0
    for rows, first in zip(expected, first_rows(got.layout, [len(rows) for rows in expected])):
        for i, (r, t, k) in enumerate(rows):
            assert [int(n) for n in got.origins[first + i]] == [r, t, k]
            assert torch.equal(torch.as_tensor(got.rows[first + i]), torch.as_tensor(x[r][t]))
            assert float(got.weights[packed]) == float(weights[r][t, k])
            packed += 1


def scaled(got):
    """Stand-ins for experts: each row times a number of its own."""
    rank, token, k = (got.origins[:, i].double() for i in range(3))
    factor = (rank + 1) * 0.5 + token * 0.25 - k
    return (got.rows.double() * factor[:, None]).to(got.rows.dtype)


def combined(x, ids, weights, rank):
    """What scaled() and combine make of a rank's tokens, and the sum of magnitudes."""
    out = torch.zeros(x[rank].shape, dtype=torch.float64)
    size = torch.zeros_like(out)
    for k in range(K):
        token = torch.arange(x[rank].shape[0])
        factor = (rank + 1) * 0.5 + token.double() * 0.25 - k
        row = (x[rank].double() * factor[:, None]).to(x[rank].dtype).double()
        there = (ids[rank][:, k] >= 0) & (ids[rank][:, k] < E)
        value = row * (weights[rank][:, k].double() * there)[:, None]
        out += value
        size += value.abs()
    return out, size


@pytest.mark.parametrize("layout", ["packed", ("blocked", 4), ("padded", 0), ("padded", 40)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_there_and_back(ranks, layout):
    x, ids, weights = batch(ranks, seed=ranks)

    def body(world):
        exchange = exchange_of(
            world, hidden=H, num_experts=E, top_k=K, max_tokens=M, layout=layout, combine="bf16"
        )
        assert exchange.own_experts == world.own_experts(E)
        got = exchange.dispatch(x[world.rank], ids[world.rank], weights[world.rank])
        assert got.rows.shape == (exchange.rows_needed, H)
        check_received(got, exchange, x, ids, weights)
        # Rows of nobody hold anything.
        got.origins[got.origins < 0] = 0
        out = exchange.combine(scaled(got), got.handle, out=torch.empty(x[world.rank].shape))
        expected, size = combined(x, ids, weights, world.rank)
        assert ((out.double() - expected).abs() <= 8 * 2**-24 * size + 1e-30).all()
        assert exchange.combine(scaled(got), got.handle).dtype == torch.bfloat16
        return exchange.stats()

    stats, failures = run_ranks(World.threads(ranks), body)
    assert failures == [None] * ranks
    for r, of_rank in enumerate(stats):
        assert (of_rank.dispatches, of_rank.combines, of_rank.tokens) == (1, 2, x[r].shape[0])
    assert sum(s.rows_received for s in stats) == sum(
        int(((i >= 0) & (i < E)).sum()) for i in ids
    )


def test_arrays_of_numpy():
    x, ids, weights = batch(2, dtype=torch.float16)
    x, ids, weights = ([a.numpy() for a in arrays] for arrays in (x, ids, weights))

    def body(world):
        exchange = exchange_of(world, hidden=H, num_experts=E, top_k=K, max_tokens=M, dispatch="fp16")
        handle = exchange.dispatch_send(x[world.rank], ids[world.rank].astype("int32"), weights[world.rank])
        got = exchange.dispatch_recv(handle, exact=True)
        assert isinstance(got.rows, numpy.ndarray) and got.rows.dtype == numpy.float16
        assert got.rows.shape[0] == int(got.num_rows[0])
        check_received(got, exchange, x, [torch.from_numpy(i) for i in ids], weights)
        out = exchange.combine(got.rows, got.handle)
        assert isinstance(out, numpy.ndarray) and out.dtype == numpy.float16
        there = ((ids[world.rank] >= 0) & (ids[world.rank] < E)) * weights[world.rank]
        expected = x[world.rank].astype("float64") * there.sum(axis=1, keepdims=True)
        numpy.testing.assert_allclose(out, expected, rtol=2e-3, atol=1e-6)

    assert run_ranks(World.threads(2), body)[1] == [None] * 2


def test_fp8_rows_feed_a_grouped_gemm():
    """The rows, ends, scales and weights are what GroupedGemm takes; the whole layer is right."""
    n = 64
    w = torch.randn(E, n, H) / 12
    x, ids, weights = batch(2, seed=3)

    def body(world):
        own = world.own_experts(E)
        exchange = exchange_of(
            world, hidden=H, num_experts=E, top_k=K, max_tokens=M, dispatch="fp8", combine="f32"
        )
        got = exchange.dispatch(x[world.rank], ids[world.rank], weights[world.rank])
        assert got.rows.dtype == torch.float8_e4m3fn
        quantised = got.rows.float().reshape(-1, H) * got.scales.repeat_interleave(128, dim=1)[:, :H]
        # The expert: back to H columns, by the transpose.
        y = torch.zeros(got.rows.shape[0], H)
        begin = 0
        for e, end in zip(own, got.ends.tolist()):
            y[begin:end] = quantised[begin:end] @ w[e].T @ w[e]
            begin = end
        out = exchange.combine(y, got.handle)
        fp8 = torch.stack([w[e] for e in own]).to(torch.float8_e4m3fn)
        gemm = switchyard.GroupedGemm(
            fp8, w_scale=torch.ones(len(own)), max_rows=got.rows.shape[0], num_threads=1
        )
        product = gemm(got.rows, got.ends, x_scale=got.scales, row_weights=got.weights)
        total = int(got.num_rows[0])
        reference = torch.cat([
            quantised[b:e].double() @ matrix.double().T
            for b, e, matrix in zip([0, *got.ends.tolist()], got.ends.tolist(), fp8)
        ])
        reference *= got.weights[:total, None]
        assert (product[:total].double() - reference).abs().max() <= 0.01 * reference.abs().max()
        return out

    outs, failures = run_ranks(World.threads(2), body)
    assert failures == [None] * 2
    for r, out in enumerate(outs):
        expected = torch.zeros(x[r].shape, dtype=torch.float64)
        for t in range(x[r].shape[0]):
            for k in range(K):
                e = int(ids[r][t, k])
                if 0 <= e < E:
                    row = x[r][t].double() @ w[e].double().T @ w[e].double()
                    expected[t] += float(weights[r][t, k]) * row
        assert (out.double() - expected).abs().max() <= 0.05 * expected.abs().max()


def test_given_fp8_and_outputs_of_the_callers():
    x = torch.randn(5, H).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 2)
    exchange = exchange_of(
        World.single(), hidden=H, num_experts=E, top_k=1, max_tokens=M, dispatch="fp8", layout=("padded", 6)
    )
    ids = torch.tensor([[3], [3], [9], [0], [3]])
    rows = torch.zeros(E, 6, H, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(E * 6, 2)
    got = exchange.dispatch(x, ids, x_scale=scale, out=rows, scales_out=scales)
    assert got.rows.data_ptr() == rows.data_ptr() and got.scales is scales
    assert torch.equal(rows[3, :3].view(torch.uint8), x[[0, 1, 4]].view(torch.uint8))
    assert torch.equal(got.by_expert.view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(scales.view(E, 6, 2)[3, :3], scale[[0, 1, 4]])
    assert got.weights[:5].tolist() == [1] * 5
    assert exchange.combine_dtype == "bf16"
    y = torch.ones(E, 6, H, dtype=torch.bfloat16)
    out = exchange.combine(y, got.handle, out=torch.full((5, H), 2.0), scale=3, accumulate=True)
    assert (out == 5).all()


def test_weights_of_the_sender_and_sums_before_the_way():
    x, ids, weights = batch(2, seed=5, tokens=[9, 12], dtype=torch.float32)

    def body(world):
        outs = []
        for pre_sum in (False, True):
            exchange = exchange_of(
                world, hidden=H, num_experts=E, top_k=K, max_tokens=M, dispatch="f32",
                weights="sender", pre_sum=pre_sum,
            )
            got = exchange.dispatch(x[world.rank], ids[world.rank], weights[world.rank])
            got.origins[got.origins < 0] = 0
            outs.append(exchange.combine(scaled(got), got.handle))
            returned = exchange.stats().rows_returned
        tokens = {(r, t) for e in exchange.own_experts for r, t, _ in rows_of(ids, e) if r != world.rank}
        assert returned == len(tokens)
        return outs

    outs, failures = run_ranks(World.threads(2), body)
    assert failures == [None] * 2
    for r, both in enumerate(outs):
        expected, size = combined(x, ids, weights, r)
        for out in both:
            assert ((out.double() - expected).abs() <= 16 * 2**-24 * size + 1e-30).all()


def test_reuse_and_order_of_calls():
    x, ids, weights = batch(2, seed=6, tokens=[4, 7])
    others = batch(2, seed=7, tokens=[4, 7])[0]

    def body(world):
        exchange = exchange_of(world, hidden=H, num_experts=E, top_k=K, max_tokens=M, trace=True)
        handle = exchange.make_handle()
        with pytest.raises(switchyard.InvalidArgument, match="nothing was sent"):
            exchange.dispatch_recv(handle)
        assert exchange.dispatch_send(x[world.rank], ids[world.rank], weights[world.rank], handle=handle) is handle
        with pytest.raises(switchyard.InvalidArgument, match="dispatch_recv"):
            exchange.dispatch_send(x[world.rank], ids[world.rank])
        got = exchange.dispatch_recv(handle)
        assert handle.tokens == x[world.rank].shape[0]
        check_received(got, exchange, x, ids, weights)
        again = exchange.dispatch(others[world.rank], handle=handle)
        check_received(again, exchange, others, ids, weights)
        names = {event["name"] for event in exchange.trace()["traceEvents"]}
        assert any("pack" in name for name in names), names
        with pytest.raises(switchyard.InvalidArgument, match="no ids"):
            exchange.dispatch_send(x[world.rank])

    assert run_ranks(World.threads(2), body)[1] == [None] * 2


def test_refusals():
    world = World.single()

    def make(**options):
        return Exchange(world, **({"hidden": H, "num_experts": E, "top_k": K, "max_tokens": M} | options))

    for options, text in [
        ({"hidden": 0}, "hidden is 0"),
        ({"layout": "blocked"}, "layout is 'blocked'"),
        ({"layout": ("blocked", torch.ones(2))}, "layout is tensor"),
        ({"layout": (torch.ones(2), 4)}, "layout is .tensor"),
        ({"weights": "both"}, "weights is 'both'"),
        ({"weights": torch.ones(2)}, "weights is tensor"),
        ({"pre_sum": True}, "pre_sum"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"placement": [0, 1]}, "no place for expert 2"),
        ({"num_threads": -1}, "num_threads is -1"),
    ]:
        with pytest.raises(switchyard.InvalidArgument, match=text):
            make(**options)
    if not switchyard.has_cuda():
        with pytest.raises(switchyard.Unsupported):
            make(device="cuda")
    exchange = make(num_threads=1)
    x, ids = torch.randn(2, H).bfloat16(), torch.tensor([[0, 1, 2], [3, 4, 5]])
    many = torch.randn(M + 1, H).bfloat16()
    with pytest.raises(switchyard.CapacityExceeded, match=f"{M + 1} tokens"):
        exchange.dispatch(many, ids.repeat(7, 1)[: M + 1])
    with pytest.raises(switchyard.DTypeMismatch, match="tokens are f32"):
        exchange.dispatch(x.float(), ids)
    with pytest.raises(switchyard.ShapeMismatch, match="need"):
        exchange.dispatch(x, ids[:1])
    with pytest.raises(switchyard.InvalidArgument, match="twice"):
        exchange.dispatch(x, torch.zeros(2, K, dtype=torch.int32))
    with pytest.raises(switchyard.Unsupported, match="backward"):
        exchange.dispatch(x.clone().requires_grad_(), ids)
    handle = exchange.dispatch_send(x, ids)
    with pytest.raises(switchyard.CapacityExceeded, match="6 rows"):
        exchange.dispatch_recv(handle, out=x)
    got = exchange.dispatch_recv(handle)
    with pytest.raises(switchyard.ShapeMismatch, match="a result for each"):
        exchange.combine(got.rows[:3], handle)
    with pytest.raises(switchyard.InvalidArgument, match="handle is None; pass an ExchangeHandle"):
        exchange.combine(got.rows, None)
    with pytest.raises(switchyard.DTypeMismatch, match="ids has dtype torch.int16"):
        exchange.dispatch(x, ids.short())
    exchange.combine_send(got.rows, handle)
    with pytest.raises(switchyard.ShapeMismatch, match="out is"):
        exchange.combine_recv(handle, out=x[:1])
    exchange.combine_recv(handle)
    with pytest.raises(switchyard.InvalidArgument, match="no trace"):
        exchange.trace()
    exchange.check()
    exchange.close()
    exchange.close()
    assert exchange.closed
    with pytest.raises(switchyard.InvalidArgument, match="closed"):
        exchange.dispatch(x, ids)


def test_a_rank_that_does_not_come_is_named():
    def body(world):
        exchange = exchange_of(world, hidden=H, num_experts=E, top_k=K, max_tokens=M, deadline=0.3)
        if world.rank == 1:
            return
        with pytest.raises((switchyard.Timeout, switchyard.Aborted)) as caught:
            exchange.dispatch(torch.zeros(0, H).bfloat16(), torch.zeros(0, K, dtype=torch.int64))
        assert caught.value.peer == 1
        with pytest.raises((switchyard.Timeout, switchyard.Aborted)):
            exchange.check()

    assert run_ranks(World.threads(3), body)[1] == [None] * 3


def test_nothing_is_kept():
    exchange = Exchange(World.single(), hidden=H, num_experts=E, top_k=K, max_tokens=M)
    x = torch.randn(2, H).bfloat16()
    got = exchange.dispatch(x, torch.tensor([[0, 1, 2], [3, 4, 5]]))
    handle = got.handle
    gone = [weakref.ref(x), weakref.ref(got.rows), weakref.ref(exchange)]
    storage = x.untyped_storage()._weak_ref()
    del x, got
    gc.collect()
    assert gone[0]() is None and gone[1]() is None
    assert torch.UntypedStorage._expired(storage)
    del exchange, handle
    gc.collect()
    assert gone[2]() is None


PROGRAM = """
import sys, torch, switchyard
rank, size, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
world = switchyard.World.processes(rank, size, rendezvous=name)
exchange = switchyard.Exchange(world, hidden=64, num_experts=8, top_k=2, max_tokens=9)
torch.manual_seed(rank)
for i in range(50):
    t = int(torch.randint(0, 10, ()))
    x = torch.randn(t, 64).bfloat16()
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(t)]) if t else torch.zeros(0, 2).long()
    got = exchange.dispatch(x, ids, torch.full((t, 2), 0.5))
    assert torch.equal(exchange.combine(got.rows, got.handle), x), i
"""


def test_processes():
    name = f"test_exchange {os.getpid()}"
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(r), "3", name], stderr=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    for rank in ranks:
        _, stderr = rank.communicate(timeout=120)
        assert rank.returncode == 0, stderr


@pytest.mark.parametrize("bad", [E, E + 1, 2**31 - 1, -2, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_that_no_expert_has_is_refused_and_ends_nothing(bad, dtype):
    def body(world):
        exchange = Exchange(world, hidden=H, num_experts=E, top_k=1, max_tokens=M)
        x, ids = torch.ones(2, H, dtype=torch.bfloat16), torch.tensor([[0], [-1]], dtype=dtype)
        if world.rank == 0:
            with pytest.raises(switchyard.InvalidArgument, match=rf"ids\[1\]\[0\] is {bad}"):
                exchange.dispatch(x, torch.tensor([[0], [bad]], dtype=dtype))
        got = exchange.dispatch(x, ids)
        with pytest.raises(switchyard.ShapeMismatch, match="out is"):
            exchange.combine(got.rows, got.handle, out=torch.empty(2, H + 1))
        with pytest.raises(switchyard.DTypeMismatch, match="out"):
            exchange.combine(got.rows, got.handle, out=torch.empty(2, H, dtype=torch.int32))
        with pytest.raises(switchyard.ShapeMismatch, match="rows"):
            exchange.combine(got.rows[:, :-8], got.handle)
        return exchange.combine(got.rows, got.handle).float().sum(1)

    sums, failures = run_ranks(World.threads(2), body)
    assert failures == [None] * 2
    assert all(torch.equal(s, torch.tensor([float(H), 0.0])) for s in sums)
