"""Experts on a GPU: streams, graphs, compilation, memory, changed weights, models of transformers;
and the operators there.

Skipped where torch sees no GPU that the library runs on.
"""

import gc

import pytest
import torch

import switchyard
from reference import error, experts, routing
from switchyard import Activation, Experts, GroupedGemm, GroupedSchedule, Memory, Numerics, has_cuda

_on_gpu = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and has_cuda()
)
pytestmark = pytest.mark.skipif(not _on_gpu, reason="no H100 or H200 that torch and the library use")

E, I, H, K = 16, 256, 512, 4
GPU = "cuda"


def weights(dtype=torch.bfloat16, experts=E, intermediate=I, hidden=H):
    w13 = torch.randn(experts, 2 * intermediate, hidden, device=GPU) / hidden**0.5
    w2 = torch.randn(experts, hidden, intermediate, device=GPU) / intermediate**0.5
    return w13.to(dtype), w2.to(dtype)


def batch(tokens, dtype=torch.bfloat16, num_experts=E, hidden=H):
    ids, topk_weights = routing(tokens, num_experts, K)
    return torch.randn(tokens, hidden, device=GPU).to(dtype), ids.to(GPU), topk_weights.to(GPU)


def expected(x, ids, topk_weights, w13, w2, dtype=torch.float64):
    gate, up = w13.chunk(2, dim=1)
    return experts(x, gate, up, w2, ids, topk_weights, Activation(), dtype=dtype)


def assert_as_good_as_torch(actual, w13, w2, x, ids, topk_weights):
    """Error below twice that of torch in bf16, both against fp64."""
    exact = expected(x, ids, topk_weights, w13, w2)
    bound = error(expected(x, ids, topk_weights, w13, w2, dtype=torch.bfloat16), exact)
    assert error(actual, exact) < 2 * bound


def quantised(w, block=128):
    """FP8 codes and scales of blocks, and the values that they stand for."""
    e, rows, columns = w.shape
    blocks = w.float().unflatten(1, (rows // block, block)).unflatten(3, (columns // block, block))
    scale = blocks.abs().amax(dim=(2, 4), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).reshape(e, rows, columns)
    return codes.reshape(e, rows, columns), scale[:, :, 0, :, 0].contiguous(), values


@pytest.mark.parametrize("tokens", [0, 1, 7, 32, 33, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_good_as_torch(tokens, dtype):
    w13, w2 = weights()
    given = batch(tokens, dtype)
    layer = Experts(w13, w2, top_k=K, max_tokens=256)
    out = torch.full((tokens, H), torch.nan, dtype=dtype, device=GPU)
    assert layer(*given, out=out) is out
    assert layer.backend == "cuda"
    if tokens:
        assert_as_good_as_torch(out, w13, w2, *given)
        assert torch.equal(layer(*given), out)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("topk_weights", [torch.float32, torch.bfloat16])
def test_types_of_routing(ids, topk_weights):
    w13, w2 = weights()
    x, i, w = batch(40)
    w = w.to(topk_weights)
    assert_as_good_as_torch(Experts(w13, w2, top_k=K)(x, i.to(ids), w), w13, w2, x, i, w.float())


@pytest.mark.parametrize("tokens", [1, 20, 150])
def test_fp8(tokens):
    w13, w2 = weights(torch.float32)
    (codes13, scale13, values13), (codes2, scale2, values2) = quantised(w13), quantised(w2)
    layer = Experts(codes13, codes2, w13_scale=scale13, w2_scale=scale2, top_k=K)
    assert layer.compute == "f8_e4m3"
    given = batch(tokens)
    # e4m3 has a step of 1/8 in a binade; sums of hundreds of products average that out.
    exact = expected(*given, values13, values2)
    assert error(layer(*given), exact) < 0.06


def test_runs_on_the_current_stream():
    """What is enqueued before and after, on a stream that is busy, sees and is seen in order."""
    w13, w2 = weights()
    layer = Experts(w13, w2, top_k=K)
    x, i, w = batch(64)
    wanted = layer(x, i, w)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        out = layer(late, i, w)
        doubled = out * 2
        assert not stream.query()  # nothing waited for the device
    stream.synchronize()
    assert torch.equal(doubled, wanted * 2)


@pytest.mark.parametrize("tokens", [8, 100])
def test_cuda_graphs(tokens):
    w13, w2 = weights()
    layer = Experts(w13, w2, top_k=K)
    x, i, w = batch(tokens)
    layer(x, i, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, i, w)
    for _ in range(5):
        fresh = batch(tokens)
        for to, of in zip((x, i, w), fresh):
            to.copy_(of)
        graph.replay()
        assert torch.equal(out, layer(*fresh))
    layer.check()


def test_compiles_and_is_captured():
    w13, w2 = weights()
    layer = Experts(w13, w2, top_k=K)
    compiled = torch.compile(lambda *given: layer(*given) + 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        given = batch(16)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.allclose(compiled(*given), layer(*given) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_of_a_server_share_memory(dtype):
    from switchyard import _serving

    def bound():
        options = _serving.Options()
        binding = _serving.Binding(options, activation=Activation(), order="gate_up", top_k=K, max_tokens=2048)
        return binding, binding.bind(*(w.to(dtype) for w in weights()))

    bindings = [bound()]
    free = torch.cuda.mem_get_info()[0]
    for _ in range(4):
        bindings.append(bound())
    layers = [layer for _, layer in bindings]
    used = free - torch.cuda.mem_get_info()[0]
    assert used < layers[0].workspace_bytes + (64 << 20)  # and torch's blocks of weights
    assert len({id(binding._workspace) for binding, _ in bindings}) == 1
    for tokens in (4, 100, 2000):
        given = batch(tokens)
        first = [layer(*given) for layer in layers]
        for out, layer in zip(first, layers):
            assert torch.equal(layer(*given), out)


@pytest.mark.parametrize("allocator", [None, "torch"])
def test_layers_of_different_shapes_share_a_workspace(allocator):
    before = torch.cuda.memory_allocated()
    workspace = switchyard.Workspace(
        hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=300, compute=torch.bfloat16,
        device=GPU, allocator=allocator,
    )
    if allocator == "torch":
        assert torch.cuda.memory_allocated() - before >= workspace.bytes
    sizes = [dict(), dict(intermediate=128, hidden=256), dict(experts=8)]
    layers, given, alone = [], [], []
    for size in sizes:
        w13, w2 = weights(**size)
        shape = dict(num_experts=size.get("experts", E), hidden=size.get("hidden", H))
        given.append(batch(300, **shape))
        layers.append(Experts(w13, w2, top_k=K, max_tokens=300, memory=Memory(workspace)))
        alone.append(Experts(w13, w2, top_k=K, max_tokens=300)(*given[-1]))
    for _ in range(3):
        for layer, x, expected in zip(layers, given, alone):
            assert torch.equal(layer(*x), expected)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    workspace.release()
    if allocator == "torch":
        assert held - torch.cuda.memory_allocated() >= workspace.bytes
    with pytest.raises(switchyard.Error, match="released"):
        layers[0](*given[0])
    workspace.restore()
    for layer, x, expected in zip(layers, given, alone):
        assert torch.equal(layer(*x), expected)


def test_weights_changed_in_place():
    w13, w2 = weights()
    bias = torch.randn(E, 2 * I, device=GPU)
    biases = {"w13_bias": bias, "w2_bias": torch.randn(E, H, device=GPU)}
    layer = Experts(w13, w2, **biases, top_k=K)
    given = batch(30)
    first = layer(*given)
    new13, new2 = weights()
    w13.copy_(new13)
    w2.copy_(new2)
    bias.normal_()
    fresh = layer(*given)
    other = Experts(new13, new2, **biases, top_k=K)
    assert torch.equal(fresh, other(*given)) and not torch.equal(fresh, first)
    # No counter tells of what is written through .data, and the kernel reads a copy.
    bias.data.normal_()
    stale = layer(*given)
    layer.refresh()
    assert torch.equal(stale, fresh) and not torch.equal(layer(*given), fresh)
    fresh = layer(*given)
    layer.rebind(*weights(), **biases)
    assert not torch.equal(layer(*given), fresh)


def test_refresh_in_a_graph():
    w13, w2 = weights(torch.float32)
    (codes13, scale13, _), (codes2, scale2, _) = quantised(w13), quantised(w2)
    layer = Experts(codes13, codes2, w13_scale=scale13, w2_scale=scale2, top_k=K)
    given = batch(12)
    layer(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.refresh()
        out = layer(*given)
    for factor in (1.0, 2.0, 0.5):
        scale2.mul_(factor)
        graph.replay()
        fresh = Experts(codes13, codes2, w13_scale=scale13, w2_scale=scale2, top_k=K)(*given)
        assert torch.equal(out, fresh)


def test_accumulates_and_scales():
    w13, w2 = weights()
    layer = Experts(w13, w2, top_k=K)
    given = batch(50)
    plain = layer(*given, out=torch.empty(50, H, device=GPU))
    out = torch.ones(50, H, device=GPU)
    layer(*given, out=out, accumulate=True, scale=3.0)
    assert torch.allclose(out, 1 + 3 * plain, atol=1e-4)


def test_bad_ids_are_told_later_or_skipped():
    w13, w2 = weights()
    x, i, w = batch(20)
    i[3, 1] = E + 7
    layer = Experts(w13, w2, top_k=K)
    layer(x, i, w)
    torch.cuda.synchronize()
    with pytest.raises(switchyard.InvalidArgument, match=f"token 3 has expert id {E + 7}"):
        layer.check()
    skipping = Experts(w13, w2, top_k=K, numerics=Numerics(bad_ids="skip"))
    out = skipping(x, i, w)
    assert skipping.stats().bad_slots == 1
    w[3, 1] = 0
    i[3, 1] = -1
    assert torch.equal(skipping(x, i, w), out)


def test_memory_is_given_back():
    gc.collect()
    torch.cuda.empty_cache()
    w13, w2 = weights()
    Experts(w13, w2, top_k=K).close()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        layer = Experts(w13, w2, top_k=K, max_tokens=4096)
        layer(*batch(10))
        del layer
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def test_tensors_of_the_wrong_device_are_refused():
    w13, w2 = weights()
    layer = Experts(w13, w2, top_k=K)
    x, i, w = batch(4)
    for given in ((x.cpu(), i, w), (x, i.cpu(), w), (x, i, w.cpu())):
        with pytest.raises(switchyard.InvalidArgument):
            layer(*given)
    assert isinstance(layer(x, i, w), torch.Tensor)


def same_order(actual, expected):
    """Of a GPU and of the host: a GPU's tokens are as many as the layout may need."""
    assert torch.equal(actual.ends.cpu(), expected.ends)
    assert torch.equal(actual.positions.cpu(), expected.positions)
    count = len(expected.tokens)
    assert torch.equal(actual.tokens[:count].cpu(), expected.tokens)
    assert (actual.tokens[count:] == -1).all()


@pytest.mark.parametrize("layout", ["packed", ("blocked", 16), ("padded", 20000)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 300, 20000])
def test_permute(tokens, dtype, layout):
    ids = torch.randint(-2, E + 3, (tokens, K), dtype=dtype)
    order = switchyard.permute(ids.to(GPU), E, layout)
    assert order.ends.is_cuda and order.tokens.is_cuda and order.positions.is_cuda
    same_order(order, switchyard.permute(ids, E, layout))
    assert (order.dropped is not None) == (layout[0] == "padded")
    assert order.dropped is None or order.dropped.item() == 0


def test_permute_drops_what_has_no_room():
    ids = torch.tensor([[0], [1], [0], [0], [1]], device=GPU)
    order = switchyard.permute(ids, 2, ("padded", 2))
    assert order.ends.tolist() == [2, 4]
    assert order.positions.flatten().tolist() == [0, 2, 1, -1, 3]
    assert order.tokens.tolist() == [0, 2, 1, 4]
    assert order.dropped.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [64, 77])
def test_unpermute(dtype, hidden):
    rows = torch.randn(60, hidden).to(dtype)
    positions = torch.randint(-1, 60, (33, K), dtype=torch.int32)
    topk_weights = torch.randn(33, K)
    given = rows.to(GPU), positions.to(GPU), topk_weights.to(GPU)
    out = switchyard.unpermute(*given)
    # The host may round products before it adds them.
    close = dict(rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    torch.testing.assert_close(out.cpu(), switchyard.unpermute(rows, positions, topk_weights), **close)
    total = torch.ones(33, hidden)
    there = total.to(GPU)
    assert switchyard.unpermute(*given[:2], out=there, accumulate=True, scale=0.5) is there
    switchyard.unpermute(rows, positions, out=total, accumulate=True, scale=0.5)
    torch.testing.assert_close(there.cpu(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_topk(score, dtype):
    logits, bias = torch.randn(200, 64).to(dtype), torch.randn(64) / 10
    logits[3, 5] = torch.nan
    for given, more in ((None, {}), (bias, {"groups": 8, "top_groups": 3, "renormalize": True})):
        ids, w = switchyard.topk(logits.float(), K, correction_bias=given, score=score, **more)
        there = None if given is None else given.to(GPU)
        gpu_ids, gpu_w = switchyard.topk(logits.to(GPU), K, correction_bias=there, score=score, **more)
        assert torch.equal(gpu_ids.cpu(), ids) and torch.equal(gpu_w.cpu(), w)


def operators(x, logits, w13, w2, indexed):
    """A layer of operators. Rows are gathered by the product, or before it."""
    ids, w = switchyard.topk(logits, K, renormalize=True)
    order = switchyard.permute(ids, len(w2))
    rows, index = (x, order.tokens) if indexed else (x[order.tokens.clamp(min=0)], None)
    h = switchyard.grouped_gemm(rows, w13, order.ends, activation=Activation(), index=index)
    y = switchyard.grouped_gemm(h, w2, order.ends)
    return switchyard.unpermute(y, order.positions, w), ids, w


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("tokens", [5, 700])
def test_a_layer_of_operators(tokens, indexed):
    """As good as torch; and in a graph, with other tokens and experts in each replay."""
    w13, w2 = weights()
    x = torch.randn(tokens, H, device=GPU).bfloat16()
    logits = torch.randn(tokens, E, device=GPU)
    try:
        first, _, _ = operators(x, logits, w13, w2, indexed)
    except switchyard.Unsupported as error:
        assert indexed and "index" in str(error)
        pytest.skip(str(error))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, ids, topk_weights = operators(x, logits, w13, w2, indexed)
    graph.replay()
    assert torch.equal(out, first)
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(out, operators(x, logits, w13, w2, indexed)[0])
        assert_as_good_as_torch(out, w13, w2, x, ids, topk_weights)


def test_operators_run_on_the_current_stream():
    logits = torch.randn(64, E, device=GPU)
    wanted = switchyard.permute(switchyard.topk(logits, K)[0], E)
    late = torch.zeros_like(logits)
    rows = torch.arange(64 * K, device=GPU).float()[:, None].expand(-1, 8).contiguous()
    switchyard.unpermute(rows, wanted.positions)  # the first launch of a kernel loads it
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(logits)
        ids, w = switchyard.topk(late, K)
        order = switchyard.permute(ids, E)
        sums = switchyard.unpermute(rows, order.positions)
        assert not stream.query()  # nothing waited for the device
    stream.synchronize()
    assert torch.equal(order.positions, wanted.positions)
    assert torch.equal(sums[:, 0], order.positions.float().sum(1))


def test_operators_refuse_tensors_of_another_device():
    rows, positions = torch.ones(4, 8, device=GPU), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(switchyard.InvalidArgument, match="positions is in host memory"):
        switchyard.unpermute(rows, positions)
    with pytest.raises(switchyard.InvalidArgument, match="correction_bias is in host memory"):
        switchyard.topk(torch.ones(2, 8, device=GPU), 2, correction_bias=torch.ones(8))


COUNTS = [3, 0, 150, 40, 300]  # rows of experts: no tile, one, and several


def products_of(x, w, dtype):
    """silu(gate) * up of each expert's rows, in one type."""
    rows = []
    for expert, part in enumerate(x.split(COUNTS)):
        gate, up = (part.to(dtype) @ w[expert].to(dtype).T).chunk(2, dim=1)
        rows.append(torch.nn.functional.silu(gate) * up)
    return torch.cat(rows)


@pytest.mark.parametrize("out", [torch.float16, torch.float32])
def test_fp16_operands_are_not_rounded_to_bf16(out):
    x = torch.randn(sum(COUNTS), 1024, device=GPU).half()
    w = (torch.randn(len(COUNTS), 512, 1024, device=GPU) / 32).half()
    ends = torch.tensor(COUNTS, device=GPU).cumsum(0)
    exact = products_of(x, w, torch.float64)
    bound = 2 * error(products_of(x, w, torch.float16), exact)
    room = torch.empty(len(x), 256, device=GPU, dtype=out)
    gemm = GroupedGemm(w, activation=Activation())
    assert gemm.compute == "f16"
    assert error(gemm(x, ends, out=room), exact) < bound
    # From other types, and in bf16, which has an eighth of the precision.
    assert error(GroupedGemm(w.float(), activation=Activation(), compute="f16")(x, ends, out=room), exact) < bound
    assert error(gemm(x.float(), ends, out=room), exact) < bound
    assert error(GroupedGemm(w, activation=Activation(), compute="bf16")(x, ends, out=room), exact) > bound
    with pytest.raises(switchyard.Unsupported, match="computes in f32"):
        GroupedGemm(w, compute="f32")


@pytest.mark.parametrize("splits", [None, 1, 2, 4, 8])
@pytest.mark.parametrize("fp8", [False, True])
def test_schedules(fp8, splits):
    """All that cut K into as many parts have the same bits, and one part is the rule."""
    x = torch.randn(sum(COUNTS), 1024, device=GPU).bfloat16()
    w = torch.randn(len(COUNTS), 512, 1024, device=GPU) / 32
    ends = torch.tensor(COUNTS, device=GPU).cumsum(0)
    codes, scale, values = quantised(w)
    given = dict(w=codes, w_scale=scale) if fp8 else dict(w=w.bfloat16())
    given["activation"] = Activation()
    chosen = [dict(paired=True), dict(paired=False), dict(band=1), dict(band=3, paired=True)]
    for tile_rows in (64, 128) if fp8 else (16, 48, 64, 256):
        chosen += [dict(tile_rows=tile_rows, band=band) for band in (1, 2, None)]
        chosen.append(dict(tile_rows=tile_rows, paired=True))
        if not fp8:
            chosen += [dict(tile_rows=tile_rows, stages=stages) for stages in (2, 3, 12)]
    first = GroupedGemm(**given, schedule=GroupedSchedule(splits=splits))(x, ends)
    exact = products_of(x, values if fp8 else given["w"], torch.float64)
    if fp8:  # x is quantised, too: see test_fp8
        assert error(first, exact) < 0.06
    else:
        assert error(first, exact) < 2 * error(products_of(x, given["w"], torch.bfloat16), exact)
    if splits in (None, 1):
        assert torch.equal(first, GroupedGemm(**given)(x, ends))
    for choice in chosen:
        schedule = GroupedSchedule(splits=splits, **choice)
        gemm = GroupedGemm(**given, schedule=schedule)
        for _ in range(2):  # parts that are stored are counted, and the counts cleared
            assert torch.equal(gemm(x, ends), first), schedule


def test_schedules_that_a_gpu_does_not_have():
    w = torch.randn(2, 128, 256, device=GPU)
    codes, scale, _ = quantised(w)
    w = w.bfloat16()
    for schedule, text in (
        (GroupedSchedule(tile_rows=8), "tile_rows is 8"),
        (GroupedSchedule(tile_rows=272), "tile_rows is 272"),
        (GroupedSchedule(stages=13), "stages is 13"),
        (GroupedSchedule(splits=16), "splits is 16"),
    ):
        with pytest.raises(switchyard.InvalidArgument, match=text):
            GroupedGemm(w, schedule=schedule)
    with pytest.raises(switchyard.InvalidArgument, match="tile_rows is 96; use 64 or 128"):
        GroupedGemm(codes, w_scale=scale, schedule=GroupedSchedule(tile_rows=96))
    with pytest.raises(switchyard.Unsupported, match="stages"):
        GroupedGemm(codes, w_scale=scale, schedule=GroupedSchedule(stages=4))
    # The function keeps an operator for each schedule.
    x, ends = torch.randn(4, 256, device=GPU).bfloat16(), torch.tensor([1, 4], device=GPU)
    switchyard.grouped_gemm(x, w, ends)
    with pytest.raises(switchyard.InvalidArgument, match="tile_rows is 8"):
        switchyard.grouped_gemm(x, w, ends, schedule=GroupedSchedule(tile_rows=8))


@pytest.mark.parametrize("name", ["OlmoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_models_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2,
        vocab_size=512,
    )
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**sizes)
    switchyard.register_with_transformers()
    with torch.device(GPU):
        model = getattr(transformers, name)(config).to(torch.bfloat16).eval()
        tokens = torch.randint(512, (3, 40))
    logits = {}
    for implementation in ("eager", "switchyard"):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(tokens).logits.float()
    exact = model.float()
    exact.set_experts_implementation("eager")
    with torch.no_grad():
        reference = exact(tokens).logits
    bound = error(logits["eager"], reference.double())
    assert error(logits["switchyard"], reference.double()) < 2 * bound


def test_the_c_interface_takes_torch_memory():
    """What ctypes hands over is the device's: nothing is copied to the host on the way."""
    w13, w2 = weights()
    layer = Experts(w13, w2, top_k=K)
    given = batch(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(*given)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert sum("layer_kernel" in name for name in names) == 1
    assert not any("Memcpy" in name or "memcpy" in name for name in names), names
