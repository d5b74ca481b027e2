#!/usr/bin/env python3
"""Serves whole models by vLLM or SGLang with each of their kernels for experts and with Switchyard's, and times them.

    PYTHONPATH=python:bench bench/engines.py qwen3-30b:bf16:triton qwen3-30b:bf16:switchyard --json engines.json
    PYTHONPATH=python:bench bench/engines.py --engine sglang qwen3-30b:bf16:triton qwen3-30b:bf16:switchyard

A cell is MODEL:DTYPE:BACKEND. Models are those of engine_models.py, with seeded weights; dtypes are bf16 and fp8, and of
gpt-oss bf16 and, with vLLM, mxfp4; backends are `switchyard`, the engine's own (`triton`, `deep_gemm`,
`flashinfer_cutlass`, `marlin`, ...), and two that are no rivals: `none`, whose experts return zeros at once, so that the
others' share of a step is known, and `zeroed`, which is Switchyard's with its output set to zero: the comparison of
tokens must fail there.

The program does these things with a cell, in this order, or those that --do names:
  logits   ≤ --layers layers; first logits of prompts of 1 to 2048 tokens against the same model in fp32
  tokens   greedy decoding of --prompts prompts, 256 tokens each, against the first cell of the same model and
           dtype up to the first near-tie
  times    TPOT at batches 1, 8, 32, 128; TTFT at 2048 and 8192 tokens; requests per second at 64 under way
  life     prompts again (prefix cache), sleep and wake, weights written in place, weights loaded anew: each time
           the logits of an engine that was started so

--topology dp2ep2 starts two engines of vLLM, or one of SGLang with two ranks, with data and expert parallelism over two
GPUs; dp4ep4 is the same over four. `switchyard` is its fused kernel over the ranks, `switchyard_local` its local experts
with the engine's exchange, and vLLM's own backends may name an exchange (`triton+deepep_low_latency`; its default is
allgather_reducescatter).
Batches and prompts are those of each rank, times those of the slowest, and tokens and requests per second those of
all. `life` and `none` are for one GPU. `kill` and `stop` are for two: rank 1 is killed or stopped while both serve, and
rank 0, or SGLang's engine, must end by saying so.

--more is JSON of further arguments for the engine. Exit codes: 0 all is right; 1 a wrong token or a failure; 2
unusable arguments; 77 the engine is not installed.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

import engine_models
from engine_models import DECODE_PROMPT, prompts_of
from engine_ranks import TOPOLOGIES, in_processes, joined_times
from result_rows import commit_here, merge
from script_arguments import SKIPPED, command_of, numbers

FAIL_AFTER_S = 5.0
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 64, 100, 128, 200, 256, 400, 513, 700, 1000, 1500, 2048)
KEY = ("suite", "engine", "version", "machine", "model", "layers", "dtype", "backend", "topology", "batch", "prompt")
# A divergence is a near-tie where the reference's two best logits are no farther apart than this many times the
# most that the two engines' gaps differ by where their tokens agree.
NEAR_TIE = 1.5


# ------------------------------------------------------------------------------------------- what is done


def model_of(cell, args, directory, dtype=None):
    """Of few layers, for comparisons."""
    return engine_models.write(directory, cell.model, dtype or cell.dtype, min(args.layers, cell.layers))[0]


def first_prompts(engine):
    return [prompts_of(engine.vocabulary, 1, n, n)[0] for n in LENGTHS]


def start(args, path, backend, purpose, **more):
    if args.rank is not None:
        more |= {"rank": args.rank, "reserved_sms": args.reserved_sms}
    elif args.gpus > 1:
        more |= {"ranks": args.gpus, "reserved_sms": args.reserved_sms}
    return args.adapter.Engine(path, backend, purpose, more=args.more, **more)


def logits_of(args, cell, directory):
    """In the order of first_prompts(). A rank has other lengths under way than the others."""
    engine = start(args, model_of(cell, args, directory), cell.backend, "logits")
    prompts = first_prompts(engine)
    backwards = args.rank is not None and args.rank.number % 2 == 1
    found = engine.first_logits(prompts[::-1] if backwards else prompts)
    return found[::-1] if backwards else found


def reference_logits(args, cell, directory):
    """The same values in fp32, of one engine."""
    path = model_of(cell, args, directory, "fp32")
    engine = start(args, path, "triton", "reference", quantised=None if cell.dtype == "bf16" else cell.dtype)
    return engine.first_logits(first_prompts(engine))


def relative_error(found, expected):
    return float(((found - expected) ** 2).sum() ** 0.5 / (expected**2).sum() ** 0.5)


def tokens_of(engine, args):
    prompts = [prompts_of(engine.vocabulary, 1, 16 + 7 * i, 1000 + i)[0] for i in range(args.prompts)]
    if args.rank is not None:
        prompts = args.rank.share(prompts)
        args.rank.meet()
    return engine.tokens_and_gaps(prompts, 256)


# Logits of the same weights differ by less: batches are others, and kernels round in another order.
LIFE_ERROR = {"bf16": 0.05, "fp8": 0.1}


def life_prompts(engine):
    # The longest is prefilled in chunks.
    return [prompts_of(engine.vocabulary, 1, n, n)[0] for n in (1, 17, 300, 1000, 5000)]


def fresh_life(args, cell, directory, seed):
    """First logits of an engine that was started with these weights."""
    path = model_of(cell, args, directory)
    engine = start(args, path, cell.backend, "life", seed=seed)
    return engine.first_logits(life_prompts(engine))


def life_of(args, cell, directory):
    """What happened, and the first logits after it with the seed that they must be those of."""
    engine = start(args, model_of(cell, args, directory), cell.backend, "life")
    prompts, seen = life_prompts(engine), []

    def see(what, seed):
        engine.generate(prompts, 8)  # a batch, in graphs
        seen.append((what, seed, engine.first_logits(prompts)))

    engine.live(see)
    return seen


def compare_tokens(found, expected):
    """(what to print, whether the tokens agree up to near-ties)."""
    lengths, differences, at = [], [], []
    for (tokens, gaps), (wanted, wanted_gaps) in zip(found, expected, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, wanted)) if a != b), len(wanted))
        lengths.append(same)
        differences += [abs(a - b) for a, b in zip(gaps[:same], wanted_gaps[:same])]
        if same < len(wanted):
            at.append(wanted_gaps[same])
    rms = math.sqrt(sum(d * d for d in differences) / len(differences)) if differences else math.inf
    worst = max(at, default=0.0)
    right = bool(differences) and rms < 0.2 and worst <= NEAR_TIE * max(differences)
    text = (
        f"{statistics.mean(lengths):.0f} of {len(expected[0][0])} tokens alike on average, "
        f"{len(expected) - len(at)} of {len(expected)} prompts wholly; gaps differ by {rms:.4f} rms and "
        f"{max(differences, default=math.inf):.4f} at most, and the largest gap at a divergence is {worst:.4f}"
    )
    return text, right


def times_of(engine, args):
    """(batch, prompt) to what was measured."""
    rows, number, ranks = {}, 0 if args.rank is None else 1000 * args.rank.number, args.gpus // args.engines

    def timed(what, *arguments, seed):
        # Ranks begin together, and have other prompts.
        if args.rank is not None:
            args.rank.meet()
        return what(*arguments, seed=seed + number)

    for batch in args.batches:
        timed(engine.tpot, batch, seed=1)
        times = [timed(engine.tpot, batch, seed=10 + i) for i in range(args.repeats)]
        rows[(batch, DECODE_PROMPT)] = {
            "tpot_ms": round(statistics.median(times), 4), "times_ms": [round(t, 4) for t in times],
            "tokens_per_s": round(ranks * batch * 1e3 / statistics.median(times), 1),
        }
    for length in args.first:
        timed(engine.ttft, length, seed=2)
        times = [timed(engine.ttft, length, seed=100 + i) for i in range(2 * args.repeats + 1)]
        rows[(1, length)] = {
            "ttft_ms": round(statistics.median(times), 3), "times_ms": [round(t, 3) for t in times],
        }
    if args.rate:
        rate = timed(engine.rate, 64, args.rate, 512, 128, seed=3)
        rows[(64, 512)] = {"requests_per_s": round(rate, 3), "tokens_per_s": round(rate * 128, 1)}
    return rows


class Cell:
    def __init__(self, text):
        parts = text.split(":")
        if len(parts) != 3 or parts[0] not in engine_models.MODELS or parts[1] not in ("bf16", "fp8", "mxfp4"):
            raise SystemExit(
                f"{text!r} is no cell; use MODEL:bf16|fp8|mxfp4:BACKEND, of {', '.join(engine_models.MODELS)}"
            )
        if parts[1] != "bf16" and (parts[1] == "mxfp4") != parts[0].startswith("gpt-oss"):
            raise SystemExit(f"{text!r} is no cell: gpt-oss has MXFP4, and the other models have FP8")
        self.text, (self.model, self.dtype, self.backend) = text, parts
        self.layers = engine_models.MODELS[self.model]["num_hidden_layers"]


def device():
    import torch

    cuda = torch.cuda.is_available()
    return {"machine": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__}


def serve(args, cell, directory):
    """Of one engine: about it, its tokens, its times."""
    path, layers = engine_models.write(directory, cell.model, cell.dtype, args.only_layers)
    engine = start(args, path, cell.backend, "serve")
    try:
        about = {"engine": args.engine, "version": engine.version, "layers": layers, "start_s": round(engine.start_s, 1)}
        about |= device()
        if cell.backend == "switchyard":
            about |= engine.made()
        tokens = tokens_of(engine, args) if "tokens" in args.do and cell.backend != "none" else None
        times = times_of(engine, args) if "times" in args.do and cell.backend != "zeroed" else {}
        if args.rank is not None:
            args.rank.meet()  # an engine serves the others' tokens, too
    finally:
        engine.close()
    return about, tokens, times


def served(args, cell, directory):
    """As serve(), of all ranks."""
    ranks = in_processes(serve, args, cell, directory)
    about, tokens, times = ranks[0]
    if args.gpus > 1:
        about["machine"] = f"{args.gpus} x {about['machine']}"
    if len(ranks) > 1:
        times = joined_times([times for _, _, times in ranks])
        if tokens is not None:
            tokens = [prompt for _, tokens, _ in ranks for prompt in tokens]
    return about, tokens, times


def failed_engine(args, cell, directory, how, begun):
    """The last rank fails in the midst of a long batch. What the engine of all ranks ended with, if it did not end its
    process. Puts the time of the failure into `begun`."""
    engine = start(args, model_of(cell, args, directory), cell.backend, "serve")
    prompts = prompts_of(engine.vocabulary, 8 * args.gpus, DECODE_PROMPT, 5)

    def fail():
        begun.value = time.monotonic()
        engine.fail(how)

    threading.Timer(FAIL_AFTER_S, fail).start()
    try:
        engine.generate(prompts, 8192)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def failed(args, cell, directory, how):
    """What the engine of rank 0, or of all ranks, ended with, and seconds after the failure."""
    if args.engines > 1:
        return in_processes(failed_rank, args, cell, directory, how)[0]
    begun = multiprocessing.Value("d", 0.0)
    raised = pathlib.Path(directory) / args.adapter.ERRORS
    raised.unlink(missing_ok=True)
    try:
        (said,) = in_processes(failed_engine, args, cell, directory, how, begun)
    except RuntimeError as problem:
        said = str(problem)
        if "the process died" not in said:
            raise
    if not begun.value:
        raise RuntimeError(f"it ended before the last rank was to fail: {said}")
    seconds = time.monotonic() - begun.value
    # An engine that ends its own process says why in its log alone.
    return "; ".join(raised.read_text().splitlines()) if raised.exists() else said, seconds


def failed_rank(args, cell, directory, how):
    """Rank 1 fails in the midst of a long batch. Of rank 0: what its engine ended with, and seconds after that."""
    engine = start(args, model_of(cell, args, directory), cell.backend, "serve")
    prompts = prompts_of(engine.vocabulary, 8, DECODE_PROMPT, 5)
    args.rank.meet()
    begin, said = time.monotonic(), "nothing"
    if args.rank.number == 1:
        threading.Thread(target=engine.generate, args=(prompts, 8192), daemon=True).start()
        time.sleep(FAIL_AFTER_S)
        engine.fail(how)
    else:
        try:
            engine.generate(prompts, 8192)
        except Exception as problem:
            said = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin - FAIL_AFTER_S
    args.rank.meet(120)
    return said, seconds


def share(rows):
    """Adds moe_share: how much of a step is the experts, by the same engine without them, in these rows."""
    same = [name for name in KEY if name != "backend"]
    without = {tuple(row.get(name) for name in same): row for row in rows if row["backend"] == "none"}
    for row in rows:
        name = "tpot_ms" if "tpot_ms" in row else "ttft_ms"
        base = without.get(tuple(row.get(name) for name in same), {})
        if name in row and name in base and row["backend"] != "none":
            row["moe_share"] = round(1 - base[name] / row[name], 3)


def save(args, rows, commit):
    """Of the cells so far: a later one may take more time than there is."""
    command = command_of("engines.py", sys.argv[1:])
    found = [
        {"suite": "engines", "topology": args.topology} | about
        | {"model": cell.model, "dtype": cell.dtype, "backend": cell.backend, "batch": batch, "prompt": prompt}
        | row | {"commit": commit, "command": command}
        for cell, about, times in rows for (batch, prompt), row in times.items()
    ]
    share((json.loads(args.json.read_text()) if args.json.exists() else []) + found)
    merge(args.json, found, KEY)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="+", type=Cell, metavar="MODEL:DTYPE:BACKEND")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="1")
    parser.add_argument("--reserved-sms", type=int, default=2,
                        help="SMs that the fused kernel leaves to NCCL, which gets as many (default: 2)")
    parser.add_argument("--more", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--do", default="logits,tokens,times")
    parser.add_argument("--layers", type=int, default=12, help="of the models whose logits are compared")
    parser.add_argument("--only-layers", type=int, help="of the others (default: as many as the model has)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--first", type=numbers, default=[2048, 8192])
    parser.add_argument("--rate", type=int, default=192, help="requests; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.do, args.rank = args.do.split(","), None
    args.adapter = importlib.import_module(f"engine_{args.engine}")
    args.gpus = TOPOLOGIES[args.topology]
    args.engines = args.gpus if args.adapter.ENGINE_PER_RANK else 1
    if args.gpus > 1 and ("life" in args.do or any(cell.backend == "none" for cell in args.cells)):
        parser.error(f"--topology {args.topology} goes without life and without the backend none")
    if args.gpus != 2 and {"kill", "stop"} & set(args.do):
        parser.error("kill and stop need two ranks: use --topology dp2ep2")
    return args


def main():
    args = parse()
    for name, value in args.adapter.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        args.adapter.load()
    except ImportError as error:
        print(f"engines: {error}", file=sys.stderr)
        sys.exit(SKIPPED)
    commit = args.commit or commit_here()
    directory, one = tempfile.mkdtemp(), argparse.Namespace(**vars(args) | {"gpus": 1, "engines": 1})
    wrong, rows, expected, references = False, [], {}, {}
    for cell in args.cells:
        name, key = cell.text, (cell.model, cell.dtype)
        error = None
        try:
            if "logits" in args.do and cell.backend not in ("none", "zeroed"):
                if key not in references:
                    (references[key],) = in_processes(reference_logits, one, cell, directory)
                found = in_processes(logits_of, args, cell, directory)
                error = max(relative_error(logits, references[key]) for logits in found)
                print(f"{name}: error of logits {error:.4f}", flush=True)
            if "life" in args.do:
                fresh = {seed: in_processes(fresh_life, one, cell, directory, seed)[0] for seed in (1, 2)}
                for what, seed, found in in_processes(life_of, one, cell, directory)[0]:
                    off, other = (relative_error(found, fresh[s]) for s in (seed, 3 - seed))
                    right = off < LIFE_ERROR[cell.dtype] < other / 2
                    wrong |= not right
                    print(f"{name}: {what}: {'agrees' if right else 'WRONG'}: logits are off by {off:.4f}, and by "
                          f"{other:.4f} from those of the other weights", flush=True)
            for how in sorted({"kill", "stop"} & set(args.do)):
                said, seconds = failed(args, cell, directory, how)
                # Of vLLM, the process of rank 0's engine says more, in its log.
                wrong |= said == "nothing" if args.engines > 1 else "rank 1" not in said
                print(f"{name}: {how}: rank 0 ended after {seconds:.2f} s with {said}", flush=True)
            if {"tokens", "times"} & set(args.do):
                about, tokens, times = served(args, cell, directory)
                print(f"{name}: started: " + ", ".join(f"{k} {v}" for k, v in about.items() if k.startswith(("start", "made"))),
                      flush=True)
                rows.append((cell, about | {"error": error}, times))
                if tokens is not None and expected.setdefault(key, tokens) is not tokens:
                    text, right = compare_tokens(tokens, expected[key])
                    wrong |= right == (cell.backend == "zeroed")
                    print(f"{name}: {'agrees' if right else 'differs'}: {text}", flush=True)
                for (batch, prompt), row in times.items():
                    print(f"{name}: batch {batch}, prompt {prompt}: "
                          + ", ".join(f"{k} {v}" for k, v in row.items() if k != "times_ms"), flush=True)
        except Exception as problem:
            wrong = True
            print(f"{name}: failed: {problem}", flush=True)
        if args.json:
            save(args, rows, commit)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
