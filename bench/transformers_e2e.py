#!/usr/bin/env python3
"""Times whole models of transformers, with random weights, with each implementation of their experts.

For each implementation: the time to the first token of one prompt, then the time per output token of
batches that decode with a static cache, without and, where it can be captured, in a CUDA graph. The
first logits are compared with those of the first implementation.

    python bench/transformers_e2e.py --model olmoe --json transformers.json
    python bench/transformers_e2e.py --model qwen3-30b --dtype fp8 --implementations switchyard

FP8 weights run with switchyard alone where the kernels of transformers' hub are not installed; their
outputs are then compared with the same weights dequantised to bf16, by "eager".

Over ranks, each with a GPU, experts are spread: `switchyard` is its kernel over the ranks, the others are
transformers' own expert parallelism with that implementation, or its tensor parallelism with `+tp` behind the
name. `zeroed` is Switchyard's with its output set to zero, which must fail. Logits and greedy tokens are compared
with the same weights in fp32 in one process, and times are those of the slower rank:

    torchrun --nproc-per-node 2 bench/transformers_e2e.py --layers 12 --implementations grouped_mm,switchyard,zeroed
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import math
import os
import pathlib
import statistics
import sys
import time
import zlib
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
import rank_processes
from result_rows import commit_here

BLOCK = 128


def config_of(model: str, layers: int | None) -> transformers.PretrainedConfig:
    """Geometry as published (config.json of allenai/OLMoE-1B-7B-0924, Qwen/Qwen3-30B-A3B)."""
    if model == "olmoe":
        return transformers.OlmoeConfig(
            hidden_size=2048, intermediate_size=1024, num_hidden_layers=layers or 16,
            num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8,
            vocab_size=50304,
        )
    if model == "qwen3-30b":
        return transformers.Qwen3MoeConfig(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
            num_hidden_layers=layers or 48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
            vocab_size=151936,
        )
    if model == "tiny":  # to try this program without a GPU
        return transformers.OlmoeConfig(
            hidden_size=256, intermediate_size=128, num_hidden_layers=layers or 2,
            num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2,
            vocab_size=512,
        )
    raise SystemExit(f"--model is {model!r}; use olmoe, qwen3-30b or tiny")


def make_model(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> transformers.PreTrainedModel:
    torch.manual_seed(args.seed)
    config = config_of(args.model, args.layers)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    if args.dtype == "fp8":
        quantise_experts(model)
    return model


def quantise_experts(model: torch.nn.Module) -> None:
    """Puts FP8Experts in the place of the model's experts, with their weights in blocks of 128."""
    from transformers.integrations import finegrained_fp8, moe

    fp8_experts = moe.use_experts_implementation(
        finegrained_fp8.FP8Experts,
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS,
    )
    # By their names: a list of modules would keep the weights that are replaced.
    names = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.ndim == 3
    ]
    for name in names:
        module = model.get_submodule(name)
        with torch.device("meta"):
            new = fp8_experts(module.config, block_size=(BLOCK, BLOCK))
        for projection in ("gate_up_proj", "down_proj"):
            codes, scales = quantise(getattr(module, projection))
            setattr(new, projection, torch.nn.Parameter(codes, requires_grad=False))
            setattr(new, projection + "_scale_inv", torch.nn.Parameter(scales, requires_grad=False))
        new.requires_grad_(False)
        model.set_submodule(name, new)


def quantise(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = weights.shape
    blocks = weights.float().reshape(experts, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(2, 4)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weights.shape), scales.contiguous()


def dequantised(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with experts in bf16: what FP8 outputs are compared with."""
    from transformers.integrations import finegrained_fp8

    config = copy.deepcopy(model.config)
    with next(model.parameters()).device:
        plain = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    # One matrix at a time: there is no room for a third copy of a large model.
    own = model.state_dict()
    for name, module in model.named_modules():
        if not isinstance(module, finegrained_fp8.FP8Experts):
            continue
        there = plain.get_submodule(name)
        for projection in ("gate_up_proj", "down_proj"):
            scales = getattr(module, projection + "_scale_inv")
            codes = getattr(module, projection)
            for expert, to in enumerate(getattr(there, projection).data):
                wide = scales[expert].float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                to.copy_(codes[expert].float() * wide)
            del own[f"{name}.{projection}"], own[f"{name}.{projection}_scale_inv"]
    missing, unexpected = plain.load_state_dict(own, strict=False)
    if unexpected or any("_proj" in key and "experts" not in key for key in missing):
        raise SystemExit(f"the dequantised model lacks {missing} and does not have {unexpected}")
    return plain.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------ over ranks

RANKS = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
OURS = ("switchyard", "zeroed")
# Our logits may be this many times as far from fp32 as those of transformers' own in bf16.
MOST_ERROR = 2.0


def start_ranks() -> torch.device:
    """This rank's device. A rank that another one has left alone ends after two minutes."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=120)
    )
    return device


def seeded(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Matrices [.., N, K] of normal values of scale 1/sqrt(K), which keep the size of what passes through them.
    They depend on names alone, and are numbers of bf16 in every type."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            values = torch.randn(
                parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32
            )
            parameter.copy_((values if "embed" in name else values / parameter.shape[-1] ** 0.5).bfloat16())
    return model


def spread(model: Any, implementation: str) -> Any:
    """The model with its experts over the ranks, and `implementation` for them."""
    from transformers.distributed.configuration_utils import DistributedConfig

    name, _, own = implementation.partition("+")
    if own not in ("", "tp"):
        raise SystemExit(f"{implementation!r} is no implementation; behind + stands tp")
    newer = hasattr(DistributedConfig, "ep_size")
    sizes: dict[str, Any] = {"tp_size": RANKS}
    if name in OURS:
        sizes |= (
            {"ep_size": RANKS, "ep_implementation": "switchyard"} if newer
            else {"tp_plan": {"model.layers.*.mlp.experts": "switchyard"}}
        )
    else:
        model.set_experts_implementation(name)
        if not own:
            sizes |= {"ep_size": RANKS} if newer else {"enable_expert_parallel": True}
    config, _, mesh = type(model).prepare_distribute_model(DistributedConfig(**sizes))
    return type(model).maybe_distribute_model(model, config, mesh)


class Zeroed:
    """Within it, what Switchyard's experts over the ranks return is zero."""

    def __enter__(self) -> None:
        from switchyard import _hf_parallel

        self.kind = _hf_parallel.FusedExperts
        self.run = self.kind._run
        run = self.run
        self.kind._run = lambda *arguments: torch.zeros_like(run(*arguments))

    def __exit__(self, *failure: Any) -> None:
        self.kind._run = self.run


def greedy(model: Any, prompts: list[torch.Tensor], words: int) -> list[tuple[list[int], list[float]]]:
    """Of each prompt: tokens, and how far apart the two best logits were."""
    found = []
    for prompt in prompts:
        out = model(prompt, use_cache=True, logits_to_keep=1)
        tokens, gaps = [], []
        for _ in range(words):
            best = out.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            out = model(
                best.indices[:1][None], past_key_values=out.past_key_values, use_cache=True
            )
        found.append((tokens, gaps))
    return found


def slowest(times: list[float]) -> list[float]:
    """Of every step, the time of the rank that took longest."""
    if RANKS == 1:
        return times
    of_ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(of_ranks, times)
    return [max(step) for step in zip(*of_ranks, strict=True)]


def compare_over_ranks(args: argparse.Namespace, device: torch.device, about: dict[str, Any]) -> NoReturn:
    """Rows into args.json. Exit code 1: ours is wrong, or zeros pass for right."""
    from engines import compare_tokens

    generator = torch.Generator("cpu").manual_seed(args.seed)
    vocabulary = config_of(args.model, args.layers).vocab_size
    prompts = [
        torch.randint(vocabulary, (1, length), generator=generator).to(device)
        for length in (1, 7, 64, 128, 256)[: args.prompts]
    ]

    def made(dtype: torch.dtype) -> Any:
        return seeded(make_model(args, device, dtype), args.seed)

    def say(text: str) -> None:
        if RANK == 0:
            print(text, flush=True)

    # The reference is in one process: every rank has its own.
    reference = made(torch.float32)
    reference.set_experts_implementation("eager")
    first = torch.randint(vocabulary, (1, args.prompt), generator=generator).to(device)
    expected = reference(first, use_cache=False).logits.float()
    words = greedy(reference, prompts, args.words)
    del reference
    torch.cuda.empty_cache()
    rows, wrong, own = [], False, math.inf  # the least error of transformers' own
    for implementation in args.implementations:
        zeroed = implementation == "zeroed"
        model = spread(made(torch.bfloat16), implementation)
        measured = [] if zeroed else measure(args, model, implementation, device)[0]
        with Zeroed() if zeroed else contextlib.nullcontext():
            logits = model(first, use_cache=False).logits.float()
            text, right = compare_tokens(greedy(model, prompts, args.words), words)
        error = relative_error(logits, expected)
        fits = right and error < MOST_ERROR * own
        if implementation in OURS:
            wrong |= fits == zeroed
        else:
            own = min(own, error)
        say(f"{implementation}: {'agrees' if fits else 'differs'}: logits are off by {error:.2e}; {text}")
        for row in measured:
            rows.append(about | row | {"topology": f"ep{RANKS}", "error": error})
            say(line_of(args, rows[-1]))
        del model, logits
        torch.cuda.empty_cache()
    if args.json and RANK == 0:
        save(args.json, rows)
    dist.barrier()
    rank_processes.end(wrong)


# ------------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def times_of(run: Any, repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each call, from a quiet device to a quiet device."""
    times = []
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        run()
        wait(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


class Decoder:
    """A batch that decodes: its cache, its last tokens, and a graph of one step if it has one."""

    def __init__(self, model: Any, prompt: torch.Tensor, steps: int) -> None:
        self.model = model
        self.cache = transformers.StaticCache(
            config=model.config, max_cache_len=prompt.shape[1] + steps
        )
        out = model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.tokens = out.logits[:, -1:].argmax(-1)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        out = self.model(self.tokens, past_key_values=self.cache, use_cache=True)
        self.tokens.copy_(out.logits[:, -1:].argmax(-1))

    def capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL asks for events on a thread of its own.
        with torch.cuda.graph(graph, capture_error_mode="global" if RANKS == 1 else "thread_local"):
            self.step()
        self.graph = graph


def measure(args: argparse.Namespace, model: Any, implementation: str, device: torch.device) -> Any:
    """Rows of results, and the first logits. Over ranks all of them call it, and the model has its implementation."""
    if RANKS == 1:
        model.set_experts_implementation(implementation)
    generator = torch.Generator(device).manual_seed(args.seed)

    def prompt(batch: int, length: int) -> torch.Tensor:
        return torch.randint(
            model.config.vocab_size, (batch, length), generator=generator, device=device
        )

    rows = []
    first = prompt(1, args.prompt)
    logits = model(first, use_cache=False).logits.float()
    ttft = slowest(times_of(
        lambda: model(first, use_cache=True, logits_to_keep=1), args.repeats, device
    ))
    common = {
        "suite": "transformers", "model": args.model, "dtype": args.dtype,
        "implementation": implementation, "layers": model.config.num_hidden_layers,
    }
    rows.append(
        common | {"batch": 1, "prompt": args.prompt, "graph": False}
        | {"ttft_ms": round(statistics.median(ttft), 3), "times_ms": [round(t, 3) for t in ttft]}
    )
    for batch in args.batches:
        tokens = prompt(batch, args.decode_prompt)
        for graph in (False, True):
            if graph and (device.type != "cuda" or args.no_graphs):
                continue
            row = common | {"batch": batch, "prompt": args.decode_prompt, "graph": graph}
            try:
                # Warm-up, capture and measured steps.
                decoder = Decoder(model, tokens, 2 * args.steps + 8)
                decoder.step()
                if graph:
                    decoder.capture()
                decoder.step()
                times = slowest(times_of(decoder.step, args.steps, device))
            except Exception as error:  # what cannot be captured, or does not fit
                rows.append(row | {"tpot_ms": None, "refused": str(error).splitlines()[0][:200]})
                wait_or_stop(device)
                continue
            rows.append(
                row
                | {"tpot_ms": round(statistics.median(times), 4)}
                | {"times_ms": [round(t, 4) for t in times]}
            )
            del decoder
    return rows, logits


def wait_or_stop(device: torch.device) -> None:
    """After a failure: what follows means something only if the device still works."""
    try:
        wait(device)
    except Exception as error:
        raise SystemExit(f"the device does not answer any more: {error}") from error


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="olmoe", help="olmoe, qwen3-30b or tiny")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp8"], help="of the experts")
    parser.add_argument("--implementations", default="eager,grouped_mm,batched_mm,switchyard")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the timed prompt")
    parser.add_argument("--decode-prompt", type=int, default=128, help="tokens before decoding")
    parser.add_argument("--steps", type=int, default=20, help="decoding steps that are timed")
    parser.add_argument("--repeats", type=int, default=5, help="prompts that are timed")
    parser.add_argument("--no-graphs", action="store_true", help="no steps in CUDA graphs")
    parser.add_argument("--prompts", type=int, default=5, help="over ranks: greedy decoding of so many")
    parser.add_argument("--words", type=int, default=64, help="over ranks: tokens that each is decoded for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.batches = [int(b) for b in args.batches.split(",")]
    args.implementations = args.implementations.split(",")
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if RANKS > 1:
        if args.dtype != "bf16":
            raise SystemExit("over ranks --dtype is bf16")
        device = start_ranks()
    if set(OURS) & set(args.implementations):
        import switchyard

        switchyard.register_with_transformers()
    command = "transformers_e2e.py " + " ".join(sys.argv[1:])
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if RANKS > 1:
        machine, command = f"{RANKS} x {machine}", f"torchrun --nproc-per-node {RANKS} {command}"
    commit = args.commit or commit_here()
    about = {"machine": machine, "commit": commit, "command": command}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    if RANKS > 1:
        # DTensor has no views of tensors that were made in inference mode.
        with torch.no_grad():
            compare_over_ranks(args, device, about)
    with torch.inference_mode():
        model = make_model(args, device)
        expected = None
        if args.dtype == "fp8":
            generator = torch.Generator(device).manual_seed(args.seed)
            plain = dequantised(model)
            plain.set_experts_implementation("eager")
            first = torch.randint(
                model.config.vocab_size, (1, args.prompt), generator=generator, device=device
            )
            expected = plain(first, use_cache=False).logits.float()
            del plain
        rows = []
        for implementation in args.implementations:
            try:
                measured, logits = measure(args, model, implementation, device)
            except Exception as error:
                wait_or_stop(device)
                print(f"{implementation:12s} refused: {str(error).splitlines()[0][:160]}", flush=True)
                rows.append(
                    about | {"suite": "transformers", "model": args.model, "dtype": args.dtype}
                    | {"implementation": implementation, "refused": str(error).splitlines()[0][:200]}
                )
                continue
            if expected is None:
                expected = logits
            error = relative_error(logits, expected)
            if not math.isfinite(error):
                raise SystemExit(f"{implementation}: the logits are not finite")
            for row in measured:
                rows.append(about | row | {"error": error})
                print(line_of(args, rows[-1]), flush=True)
    if args.json:
        save(args.json, rows)


def line_of(args: argparse.Namespace, row: dict[str, Any]) -> str:
    shown = row.get("ttft_ms") or row.get("tpot_ms")
    return (
        f"{args.model} {args.dtype} {row['implementation']:12s} batch {row['batch']:4d} "
        f"prompt {row['prompt']:5d} {'graph ' if row['graph'] else 'eager '}"
        f"{'ttft' if 'ttft_ms' in row else 'tpot'} "
        f"{shown if shown is not None else row['refused']} ms, error {row['error']:.2e}"
    )


def save(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """In the place of those of the same models, types, implementations and topologies."""
    key_of = lambda row: tuple(row.get(k) for k in ("model", "dtype", "implementation", "topology"))
    mine, kept = set(map(key_of, rows)), []
    if path.exists():
        kept = [row for row in json.loads(path.read_text()) if key_of(row) not in mine]
    text = ",\n".join(json.dumps(row) for row in kept + rows)
    path.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
