"""One rank of a model of transformers whose experts Switchyard runs over all ranks, for test_hf_parallel.py.
torchrun's variables say which.

    hf_ranks.py TOPOLOGY MODEL[,MODEL...] [SIGNAL]

It says what it saw in lines of JSON, of each model behind a line with its name.
"""

import copy
import datetime
import json
import os
import signal
import sys

import torch
import torch.distributed as dist
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

import switchyard
from reference import SMALL_MODEL, error
from switchyard import _hf_parallel

SMALL = SMALL_MODEL | {"initializer_range": 0.3}
MODELS = {
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        lambda: transformers.Qwen3MoeConfig(**SMALL, moe_intermediate_size=48, num_experts=8),
    ),
    # Biases, interleaved rows and transposed matrices.
    "gpt_oss": (
        transformers.GptOssForCausalLM,
        lambda: transformers.GptOssConfig(**SMALL, intermediate_size=64, num_local_experts=8),
    ),
    "fp8": (
        lambda config: in_fp8(config),
        lambda: transformers.Qwen3MoeConfig(
            **SMALL | {"hidden_size": 256}, moe_intermediate_size=128, num_experts=8
        ),
    ),
}
# Scales that a quantizer of transformers adds to a plan.
SCALES = {f"model.layers.*.mlp.experts.{name}_proj_scale_inv": "grouped_gemm" for name in ("gate_up", "down")}
# Most tokens of a batch where ranks have batches of their own, and the deadline, in seconds.
MOST, DEADLINE = 1600, 4.0


def in_fp8(config):
    """Qwen3-MoE whose experts are of FP8 in blocks. The model of one process runs them with Switchyard, too: eager has
    only kernels of GPUs."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    kind = use_experts_implementation(
        experts_class=type("Fp8Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    config._experts_implementation = "switchyard"
    model = transformers.Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts = kind(config, block_size=(128, 128))
        for parameter in layer.mlp.experts.parameters():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.data = (torch.randn(parameter.shape) * 100).to(torch.float8_e4m3fn)
            else:
                parameter.data = torch.rand(parameter.shape) / 500
            parameter.requires_grad_(False)
    return model


def say(**what):
    print(json.dumps(what), flush=True)


def topology(name, model, ranks):
    """What a user says to transformers. `tp`: all ranks have one batch; `dp`: each has its own; `tp_dp`: two have one;
    `copies`: each expert is on two ranks, which FSDP shards."""
    if not hasattr(DistributedConfig, "ep_size"):
        assert name == "tp"
        return DistributedConfig(tp_size=ranks, tp_plan={"model.layers.*.mlp.experts": "switchyard"})
    sizes = {
        "tp": dict(tp_size=ranks, ep_size=ranks),
        "dp": dict(fsdp_size=ranks, ep_size=ranks),
        "tp_dp": dict(tp_size=2, fsdp_size=ranks // 2, ep_size=ranks),
        "copies": dict(fsdp_size=ranks, ep_size=ranks // 2),
    }
    plan = SCALES if model == "fp8" else None
    return DistributedConfig(**sizes[name], ep_plan=plan, ep_implementation="switchyard")


def made(name):
    torch.manual_seed(0)
    kind, config = MODELS[name]
    model = kind(config()).eval()
    for parameter in model.model.layers.parameters():
        # Biases that count, too.
        if parameter.dim() == 2 and parameter.shape[0] == 8:
            parameter.data.normal_(std=0.3)
    return model


def distributed(model, config):
    """As from_pretrained(distributed_config=config) does, which wants accelerate and a checkpoint."""
    config, _, mesh = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model, config, mesh)


def batch_of(name, tokens, rank):
    """Tokens of one prompt: other ones, and other numbers of them, where ranks have batches of their own."""
    number = {"tp": 0, "tp_dp": rank // 2}.get(name, rank)
    generator = torch.Generator().manual_seed(100 * tokens + number)
    return torch.randint(0, 96, (1, tokens + 3 * number), generator=generator)


@torch.no_grad()
def say_errors(model, single, name, rank):
    """Of logits, and of one layer's experts: with few tokens, none, more than before, and ids that mean none."""
    for tokens in (9, 1, 1500, 3):
        ids = batch_of(name, tokens, rank)
        say(tokens=ids.shape[1], error=error(model(ids).logits, single(ids).logits.double()))
    ours, theirs = model.model.layers[1].mlp.experts, single.model.layers[1].mlp.experts
    for tokens in (40, 0):
        generator = torch.Generator().manual_seed(tokens)
        rows = tokens if name.startswith("tp") else tokens * rank
        x = torch.randn(rows, model.config.hidden_size, generator=generator)
        weights, ids = torch.rand(rows, 8, generator=generator).topk(2)
        expected = theirs(x, ids, weights.clone().masked_fill_(ids == 3, 0))
        actual = ours(x, ids.masked_fill(ids == 3, -1), weights)
        say(rows=rows, error=error(actual, expected.double()) if rows else float(actual.shape != x.shape))


@torch.no_grad()
def say_more(model, single, name, rank):
    """Words that are generated, what a layer that returns zeros would do, and what is refused."""
    if name == "tp":
        ids = batch_of(name, 9, rank)
        words = [m.generate(ids, max_new_tokens=5, do_sample=False).tolist() for m in (model, single)]
        say(same_words=words[0] == words[1])
    else:
        try:
            model(batch_of(name, MOST + 1, rank))
        except switchyard.CapacityExceeded as refusal:
            say(too_many=str(refusal))
    ids = batch_of(name, 9, rank)
    run = _hf_parallel.FusedExperts._run
    _hf_parallel.FusedExperts._run = lambda self, *arguments: torch.zeros_like(run(self, *arguments))
    say(error_of_zeros=error(model(ids).logits, single(ids).logits.double()))
    _hf_parallel.FusedExperts._run = run
    for changed in (model, single):
        experts = changed.model.layers[0].mlp.experts
        experts.act_fn = torch.nn.GELU() if hasattr(experts, "act_fn") else None
        experts.alpha = 1.5
    say(error_of_another_activation=error(model(ids).logits, single(ids).logits.double()))
    if name == "tp":
        say(compiled=error(torch.compile(model, backend="eager")(ids).logits, single(ids).logits.double()))


def say_gradient(model, single, name, rank):
    ids = batch_of(name, 9, rank)
    logits = model(ids).logits
    say(error_with_gradients=error(logits, single(ids).logits.double()))
    try:
        logits.sum().backward()
    except switchyard.Unsupported as refusal:
        say(gradient=str(refusal))


@torch.no_grad()
def say_who_failed(model, name, rank, ranks, how):
    """The last rank ends, or stops, before its experts in the second layer of the second pass."""
    ids = batch_of(name, 9, rank)
    model(ids)
    say(ready=os.getpid())
    if rank == ranks - 1:
        experts = model.model.layers[1].mlp.experts
        experts.forward = lambda *_: os.kill(os.getpid(), getattr(signal, how))
    try:
        model(ids)
    except switchyard.Error as failure:
        say(failure=str(failure), kind=type(failure).__name__)
    os._exit(0)  # the group's own end would wait for the rank that stopped


def main():
    name, models, *how = sys.argv[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    options = {} if name == "tp" else {"max_tokens": MOST // (2 if name == "tp_dp" else 1)}
    switchyard.register_with_transformers(num_threads=1, deadline=DEADLINE if how else 60.0, **options)
    for model_name in models.split(","):
        single = made(model_name)
        model = distributed(copy.deepcopy(single), topology(name, model_name, ranks))
        experts = model.model.layers[0].mlp.experts
        say(model=model_name, shard=list(experts.down_proj.to_local().shape), experts=experts.num_experts)
        if how:
            say_who_failed(model, name, rank, ranks, *how)
        say_errors(model, single, name, rank)
        say_more(model, single, name, rank)
        say_gradient(model, single, name, rank)
        dist.barrier()
    os._exit(0)  # as bench/rank_processes.py ends ranks, and why


main()
