"""bench/engines.py without an engine: the weights that it fills in, and the comparison that must find a wrong token."""

import json
import logging
import os
import pickle
import random
import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import engine_models
import engine_ranks
import engine_sglang
import engines
import result_rows

E, I, H = 3, 128, 256


def parameters(dtype=torch.bfloat16, fp8=False):
    """By the names that engines have."""
    matrix = torch.float8_e4m3fn if fp8 else dtype
    found = {
        "model.embed_tokens.weight": torch.empty(64, H, dtype=dtype),
        "model.layers.0.input_layernorm.weight": torch.empty(H, dtype=dtype),
        "model.layers.0.self_attn.qkv_proj.weight": torch.empty(512, H, dtype=matrix),
        "model.layers.0.mlp.gate.weight": torch.empty(E, H, dtype=dtype),
        "model.layers.0.mlp.experts.routed_experts.w13_weight": torch.empty(E, 2 * I, H, dtype=matrix),
        "model.layers.0.mlp.experts.routed_experts.w2_weight": torch.empty(E, H, I, dtype=matrix),
    }
    if fp8:
        for name, p in list(found.items()):
            if p.dtype == torch.float8_e4m3fn:
                blocks = [-(-n // 128) for n in p.shape[-2:]]
                found[name + "_scale_inv"] = torch.empty(*p.shape[:-2], *blocks)
        found["model.layers.0.self_attn.attn.k_scale"] = torch.tensor(-1.0)
    return found


def filled(found, **more):
    model = torch.nn.Module()
    model.named_parameters = lambda: iter(found.items())
    engine_models.fill(model, **more)
    return found


def test_the_same_values_in_every_type_and_under_every_default():
    wide = filled(parameters(torch.float32))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as engines do while they load
    try:
        narrow = filled(parameters())
    finally:
        torch.set_default_dtype(before)
    for name, value in narrow.items():
        assert torch.equal(value.float(), wide[name]), name
        assert value.float().std() > 0 or "norm" in name
    other = filled(parameters(), seed=2)
    assert not torch.equal(other["model.embed_tokens.weight"], narrow["model.embed_tokens.weight"])


def test_the_reference_of_fp8_has_its_values():
    model, reference = filled(parameters(fp8=True)), filled(parameters(torch.float32), quantised="fp8")
    assert model["model.layers.0.self_attn.attn.k_scale"] == -1
    for name, value in model.items():
        if value.dtype == torch.float8_e4m3fn:
            wide = model[name + "_scale_inv"].repeat_interleave(128, -2).repeat_interleave(128, -1)
            assert torch.equal(value.float() * wide[..., : value.shape[-2], : value.shape[-1]], reference[name])
            # Outputs of unit scale, from inputs of unit scale.
            assert 0.5 < float(reference[name].std() * value.shape[-1] ** 0.5) < 2


HIDDEN, INTERMEDIATE = 96, 64


def packed(columns=1, rows=1, experts=E):
    """Of an engine that pads sizes to multiples."""
    hidden, intermediate = HIDDEN + -HIDDEN % columns, INTERMEDIATE + -INTERMEDIATE % rows
    found, layer = {}, "model.layers.0.mlp.experts.routed_experts."
    for name, n, k in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        found[f"{layer}{name}_weight"] = torch.full((experts, n, k // 2), 7, dtype=torch.uint8)
        found[f"{layer}{name}_weight_scale"] = torch.full((experts, n, k // 32), 7, dtype=torch.uint8)
        found[f"{layer}{name}_bias"] = torch.full((experts, n), 7.0, dtype=torch.bfloat16)
    model = torch.nn.Module()
    model.named_parameters = lambda: iter(found.items())
    model.config = SimpleNamespace(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    engine_models.fill(model)
    return {name.rsplit(".")[-1]: value for name, value in found.items()}


def test_mxfp4_is_the_same_however_an_engine_pads():
    """And the reference in fp32 has its values: the layer's numbers beyond the padding are zeros."""
    plain, wide = packed(), packed(columns=128, rows=128)
    reference = filled({
        f"model.layers.0.mlp.experts.routed_experts.{name}_weight": torch.empty(E, n, k)
        for name, n, k in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE))
    }, quantised="mxfp4")  # fmt: skip
    for name, value in plain.items():
        corner = tuple(map(slice, value.shape))
        assert torch.equal(wide[name][corner], value), name
        rest = wide[name].clone()
        rest[corner] = 0
        assert wide[name].shape != value.shape and not rest.any()
    for full, value in reference.items():
        name = full.rsplit(".")[-1]
        assert torch.equal(engine_models.from_mxfp4(plain[name], plain[name + "_scale"]), value)
        assert 0.5 < float(value.std() * value.shape[-1] ** 0.5) < 2
        assert value.unique().numel() > 15  # that one exponent gives


def test_numbers_of_mxfp4():
    """The first of two is in the low half of a byte, as in checkpoints of gpt-oss."""
    codes, exponents = torch.tensor([[0x21, 0xF8] + 14 * [0]], dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)
    found = engine_models.from_mxfp4(codes, exponents)
    assert found.shape == (1, 32) and found[0, :4].tolist() == [1.0, 2.0, 0.0, -12.0]


def test_what_is_not_known_is_refused():
    with pytest.raises(SystemExit, match="rotary.inv of shape"):
        filled({"rotary.inv": torch.empty(7)})
    with pytest.raises(SystemExit, match="gate.weight is FP8"):
        filled({"mlp.gate.weight": torch.empty(E, H, dtype=torch.float8_e4m3fn)})


def test_a_checkpoint_has_all_values_once():
    found = filled(parameters(fp8=True))
    loose = {name: p for name, p in found.items() if not name.endswith("k_scale")}
    made = dict(engine_models.checkpoint(parameters(fp8=True), [256, 128, 128], seed=1))
    assert sum(p.numel() for p in made.values()) == sum(p.numel() for p in loose.values())
    w13 = found["model.layers.0.mlp.experts.routed_experts.w13_weight"]
    assert torch.equal(made["model.layers.0.mlp.experts.2.up_proj.weight"].float(), w13[2, I:].float())
    scale = found["model.layers.0.mlp.experts.routed_experts.w2_weight_scale_inv"]
    assert torch.equal(made["model.layers.0.mlp.experts.1.down_proj.weight_scale_inv"], scale[1])
    qkv = found["model.layers.0.self_attn.qkv_proj.weight"]
    assert torch.equal(made["model.layers.0.self_attn.v_proj.weight"].float(), qkv[384:].float())
    assert made["model.layers.0.self_attn.k_proj.weight_scale_inv"].shape == (1, 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_ranks_have_the_experts_of_one_engine(engine):
    class Layer(torch.nn.Module):
        def __init__(self, first, own):
            super().__init__()
            there = torch.full((E,), -1)
            there[first : first + own] = torch.arange(own)
            if engine == "vllm":
                self.register_buffer("_expert_map", there if own < E else None)
            else:
                self.num_experts, self.num_local_experts = E, own
                self.moe_ep_size, self.moe_ep_rank = E // own, first // own
            for name, rows, columns in (("w13", 2 * I, H), ("w2", H, I)):
                matrix = torch.empty(own, rows, columns).to(torch.float8_e4m3fn)
                setattr(self, name + "_weight", torch.nn.Parameter(matrix, requires_grad=False))
                scale = torch.empty(own, rows // 128, columns // 128)
                setattr(self, name + "_weight_scale_inv", torch.nn.Parameter(scale, requires_grad=False))

    def model(*share):
        made = torch.nn.Sequential(torch.nn.Linear(H, H, bias=False), Layer(*share))
        engine_models.fill(made)
        return dict(made.named_parameters())

    whole, ranks = model(0, E), [model(0, 2), model(2, 1)] if engine == "vllm" else [model(i, 1) for i in range(E)]
    for name, value in whole.items():
        parts = [rank[name] for rank in ranks]
        found = torch.cat([part.float() for part in parts]) if name.startswith("1.") else parts[1]
        assert torch.equal(value.float(), found), name


def one_of(args, what):
    if what == "die":
        os._exit(3)
    if args.rank is None:
        return what
    args.rank.meet(30)
    if what == "fail" and args.rank.number:
        raise ValueError("no such expert")
    return args.rank.number, args.rank.share([1, 2, 3, 4, 5, 6, 7])


def test_engines_of_several_ranks():
    args = SimpleNamespace(engines=2)
    assert engine_ranks.in_processes(one_of, args, "work") == [(0, [1, 2, 3, 4, 5]), (1, [6, 7])]
    assert engine_ranks.in_processes(one_of, SimpleNamespace(engines=1), "alone") == ["alone"]
    with pytest.raises(RuntimeError, match="(?s)rank 1: Traceback.*ValueError: no such expert"):
        engine_ranks.in_processes(one_of, args, "fail")
    with pytest.raises(RuntimeError, match="rank 0: the process died\nrank 1: the process died"):
        engine_ranks.in_processes(one_of, args, "die")
    first = {(8, 128): {"tpot_ms": 2.0, "times_ms": [2.0, 3.0], "tokens_per_s": 100.0}}
    second = {(8, 128): {"tpot_ms": 2.5, "times_ms": [2.5, 2.9], "tokens_per_s": 90.0}}
    assert engine_ranks.joined_times([first, second]) == {
        (8, 128): {"tpot_ms": 2.5, "times_ms": [2.5, 3.0], "tokens_per_s": 190.0}
    }


class FailingEngine:
    """Of two ranks, whose front end says so when one fails, or ends."""

    vocabulary = 128

    def __init__(self, path, backend, purpose, *, more, ranks, reserved_sms):
        assert ranks == 2
        self.errors = path.parent / engine_sglang.ERRORS
        self.failed = threading.Event()

    def generate(self, prompts, tokens):
        assert len(prompts) == 16 and self.failed.wait(60)
        raise ValueError("rank 1 ended")

    def fail(self, how):
        if how == "stop":
            self.failed.set()
            return
        if how == "kill, and say why":
            log = logging.getLogger("scheduler of a test")
            log.addHandler(engine_sglang.Errors(self.errors))
            log.error("A scheduler hit an exception:\n  File x\nswitchyard.errors.Aborted: rank 1 of 2 ended\n")
        os._exit(1)


FAILING = SimpleNamespace(Engine=FailingEngine, ERRORS=engine_sglang.ERRORS)


@pytest.mark.parametrize(
    "how,text",
    [
        ("stop", "ValueError: rank 1 ended"),
        ("kill", "rank 0: the process died"),
        ("kill, and say why", "Aborted: rank 1 of 2 ended"),
    ],
)
def test_an_engine_of_several_ranks_that_fails(monkeypatch, tmp_path, how, text):
    monkeypatch.setattr(engines, "FAIL_AFTER_S", 0.2)
    (tmp_path / engine_sglang.ERRORS).write_text("of an engine before\n")
    args = SimpleNamespace(engines=1, gpus=2, layers=1, more={}, reserved_sms=2, adapter=FAILING)
    said, seconds = engines.failed(args, engines.Cell("olmoe:bf16:switchyard"), tmp_path, how)
    assert said == text and 0 < seconds < 60


def test_an_engine_that_ends_too_early(monkeypatch, tmp_path):
    monkeypatch.setattr(FailingEngine, "generate", lambda self, prompts, tokens: 1 / 0)
    args = SimpleNamespace(engines=1, gpus=2, layers=1, more={}, reserved_sms=2, adapter=FAILING)
    with pytest.raises(RuntimeError, match="ended before the last rank was to fail: ZeroDivisionError"):
        engines.failed(args, engines.Cell("olmoe:bf16:switchyard"), tmp_path, "kill")


class OtherProcess:
    """vLLM's engine where its worker is a process: what is sent there is pickled."""

    def __init__(self):
        self.model = SimpleNamespace(compute_logits=lambda rows: rows)

    def apply_model(self, function):
        return [pickle.loads(pickle.dumps(function))(self.model)]

    def generate(self, prompts, *sampling, **named):
        self.model.compute_logits(torch.tensor([[0.0, 0.0], [float(len(prompts[0]["prompt_token_ids"])), 1.0]]))
        self.model.compute_logits(None)  # of a pass in which this rank had no token


def test_logits_of_a_worker_in_another_process(monkeypatch):
    import engine_vllm

    monkeypatch.setattr(engine_vllm.Engine, "greedy", staticmethod(lambda *arguments: None))
    engine = object.__new__(engine_vllm.Engine)
    engine.llm, engine.torch, engine._watched = OtherProcess(), torch, False
    assert engine.first_logits([[1, 2, 3], [4]]).tolist() == [[3.0, 1.0], [1.0, 1.0]]
    assert engine.made().keys() == {"made_layers", "made_s", "made_mib"}


def tokens(seed, noise=0.0, changed=None):
    """Of four prompts; `changed`: where a token differs, and the gap there."""
    draw, found = random.Random(seed), []
    for prompt in range(4):
        ids = [random.Random(i * 7 + prompt).randrange(1000) for i in range(64)]
        gaps = [0.5 + abs(draw.gauss(0, noise)) for _ in ids]
        if changed:
            ids[changed[0]] += 1
            gaps[changed[0]] = changed[1]
        found.append((ids, gaps))
    return found


def test_the_comparison_of_tokens():
    expected = tokens(1, noise=0.01)
    assert engines.compare_tokens(tokens(2, noise=0.01), expected)[1]
    near = [(ids, [0.005 if i == 9 else gap for i, gap in enumerate(gaps)]) for ids, gaps in expected]
    assert engines.compare_tokens(tokens(2, noise=0.01, changed=(9, 0.01)), near)[1]
    text, right = engines.compare_tokens(tokens(2, noise=0.01, changed=(9, 0.5)), expected)
    assert not right and "9 of 64 tokens alike" in text and "0 of 4 prompts wholly" in text
    # Different from the first token on, as a layer of zeros makes it.
    assert not engines.compare_tokens(tokens(2, changed=(0, 0.0)), expected)[1]
    # Alike by luck, with gaps that are not.
    assert not engines.compare_tokens(tokens(3, noise=2.0), expected)[1]


def test_cells_and_shares():
    assert engines.Cell("gpt-oss-20b:mxfp4:marlin").dtype == "mxfp4"
    for text in ("olmoe:bf16", "gpt-5:bf16:triton", "olmoe:int4:triton", "olmoe:mxfp4:marlin", "gpt-oss-20b:fp8:triton"):
        with pytest.raises(SystemExit, match="is no cell"):
            engines.Cell(text)
    row = {name: None for name in engines.KEY} | {"model": "olmoe", "dtype": "bf16", "batch": 8, "prompt": 128}
    rows = [row | {"backend": name, "tpot_ms": ms} for name, ms in (("triton", 4.0), ("none", 1.0))]
    other = row | {"backend": "triton", "dtype": "fp8", "tpot_ms": 3.0}
    engines.share([*rows, other])
    assert rows[0]["moe_share"] == 0.75 and "moe_share" not in rows[1] and "moe_share" not in other


def test_rows_of_cards_do_not_replace_each_other(tmp_path):
    path = tmp_path / "rows.json"
    row = lambda machine, us: {"machine": machine, "model": "olmoe", "us": us}
    result_rows.merge(path, [row("2 x NVIDIA H200, 132 SMs, CUDA 13.0", 1), row("NVIDIA H100 80GB HBM3", 2)], ["model"])
    result_rows.merge(path, [row("NVIDIA H200, CUDA 13.1", 3)], ["model"])
    assert [r["us"] for r in json.loads(path.read_text())] == [3, 2]


def test_models_are_written(tmp_path):
    path, layers = engine_models.write(tmp_path, "qwen3-30b", "fp8", 2)
    config = json.loads((path / "config.json").read_text())
    assert layers == config["num_hidden_layers"] == 2
    assert config["quantization_config"]["modules_to_not_convert"][1:] == [
        "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"
    ]
    path, layers = engine_models.write(tmp_path, "gpt-oss-20b", "mxfp4", 1)
    assert json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    path, layers = engine_models.write(tmp_path, "gpt-oss-20b", "bf16")
    assert len(json.loads((path / "config.json").read_text())["layer_types"]) == layers == 24


def test_the_experts_of_sglangs_reference():
    import engine_sglang
    from reference import experts
    from switchyard import Activation

    torch.manual_seed(0)
    x, w13, w2 = torch.randn(7, 32), torch.randn(E, 2 * 16, 32), torch.randn(E, 32, 16)
    scores, ids = torch.rand(7, E).topk(2)
    ids[3, 1] = -1
    gate, up = w13.chunk(2, dim=1)
    wanted = experts(x, gate, up, w2, ids.clamp(0), scores.masked_fill(ids < 0, 0), Activation())
    found = engine_sglang.plain_experts(x, w13, w2, ids, scores)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
