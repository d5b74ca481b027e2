#!/usr/bin/env python3
"""Memory and utilisation of the FlashDMoE thesis's layer, as its table 6.2 and figure 6.3a have them.

    bench/thesis_tables.py --command build/src/cli/switchyard [--backend cuda] [--ranks 2] [memory] [utilisation]

- memory: `switchyard run` at every number of tokens per rank and of experts (12 configurations), into
  thesis_memory.json: bytes of heap and workspace and of what crosses, of one rank.
- utilisation: `switchyard trace` at 8192 tokens per rank and 64 experts, several times, into
  thesis_utilisation.json: the shares of time in which a unit (an SM, a thread) has a warp in flight
  ("active") and in which it computes ("busy").

A GPU's trace of this layer needs a build with a traced kernel for plain FFNs:
cmake ... -DSWITCHYARD_GPU_TRACED_ACTIVATIONS="silu_gated;any_plain".

Exit codes: 0 done; 1 a command failed, which stderr tells; 2 unusable arguments; 77 the build has no such traced kernel,
and all else is done.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from result_rows import merge
from script_arguments import SKIPPED, numbers, parser_of

STAGES = ("memory", "utilisation")
KEY = ("machine", "hidden", "intermediate", "experts", "top_k", "ranks", "tokens_per_rank")


class Failed(Exception):
    pass


class NotBuilt(Failed):
    pass


def called(args, words):
    """The JSON that the command prints."""
    try:
        done = subprocess.run([args.command, *words], capture_output=True, text=True, timeout=args.limit)
    except OSError as problem:
        raise Failed(f"{args.command}: {problem.strerror}; name the built command with --command") from problem
    except subprocess.TimeoutExpired as problem:
        raise Failed(f"'switchyard {' '.join(words)}' took longer than {args.limit} s; raise --limit") from problem
    if done.returncode != 0:
        missing = "SWITCHYARD_GPU_TRACED_ACTIVATIONS" in done.stderr
        raise (NotBuilt if missing else Failed)(f"'switchyard {' '.join(words)}' ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def layer_words(args, command, tokens, experts):
    """The command counts the tokens of all ranks."""
    options = {"--experts": experts, "--hidden": args.hidden, "--intermediate": args.intermediate,
               "--top-k": args.top_k, "--tokens": tokens * args.ranks, "--ranks": args.ranks,
               "--backend": args.backend}
    return [command, "--model", "thesis", *(str(word) for pair in options.items() for word in pair), "--json"]


def about(args, words, machine, tokens, experts):
    return {
        "machine": machine, "commit": args.commit, "command": " ".join(["switchyard", *words]), "model": "thesis",
        "dtype": "bf16", "hidden": args.hidden, "intermediate": args.intermediate, "experts": experts,
        "top_k": args.top_k, "ranks": args.ranks, "tokens_per_rank": tokens, "backend": args.backend,
    }


def machine_of(world):
    return world.get("device") or f"processor, {world['threads']} threads"


def memory_row(args, tokens, experts):
    words = layer_words(args, "run", tokens, experts) + ["--repeat", "1"]
    told = called(args, words)
    on_gpu = args.backend == "cuda"

    def of_rank(value):
        return value / args.ranks

    crossing, heap = told["crossing"], told["heap"]
    return {
        "suite": "thesis_memory", **about(args, words, machine_of(told["world"]), tokens, experts),
        # On a GPU all of the heap is memory that is there, and nobody counts how much a pass touched.
        "heap_used_bytes": None if on_gpu else of_rank(heap["used_bytes"]),
        "heap_reserved_bytes": of_rank(heap["reserved_bytes"]),
        "workspace_bytes": of_rank(told["memory"]["workspace_bytes"]),
        "token_buffer_bytes": of_rank(heap["token_buffer_bytes"]),
        "dispatch_bytes": of_rank(crossing["dispatch_bytes"]),
        "combine_bytes": of_rank(crossing["combine_bytes"]),
        "signal_bytes": of_rank(crossing["signal_bytes"]),
        "padded_all_to_all_bytes": None if on_gpu else of_rank(crossing["padded_all_to_all_bytes"]),
        "most_tokens_of_an_expert": told["experts"]["max"],
        "dropped_slots": told["dropped_slots"],
    }


def overlap_of(told):
    """The share of the time of sending in which the rank also computes."""
    return told["overlapped_ns"] / told["communication_ns"] if told["communication_ns"] else 0


def utilisation_row(args, tokens, experts, machine):
    with tempfile.TemporaryDirectory() as directory:
        words = layer_words(args, "trace", tokens, experts) + ["--passes", str(args.passes)]
        told = [called(args, [*words, "--output", f"{directory}/trace.json"]) for _ in range(args.repeats)]
    units = sum(rank["units"] for rank in told[0]["ranks"])
    machine = machine or f"{args.ranks} ranks, {units} {told[0]['unit']}s"
    return {
        "suite": "thesis_utilisation", **about(args, words, machine, tokens, experts),
        "unit": told[0]["unit"], "units": units,
        "active": statistics.median(one["active"] for one in told),
        "busy": statistics.median(one["busy"] for one in told),
        "pass_us": statistics.median(one["pass_ns"] for one in told) * 1e-3,
        "overlap": statistics.median(overlap_of(one) for one in told),
        "all_active": [one["active"] for one in told], "all_busy": [one["busy"] for one in told],
        "all_pass_us": [one["pass_ns"] * 1e-3 for one in told],
        "dropped_events": sum(one["dropped_events"] for one in told),
    }


def parse(words):
    parser = parser_of(__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="memory, utilisation (default: both)")
    parser.add_argument("--command", default="build/src/cli/switchyard", help="the built command")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=numbers, default=[4096, 8192, 16384], help="of each rank, for memory")
    parser.add_argument("--experts", type=numbers, default=[16, 32, 64, 128], help="for memory")
    parser.add_argument("--traced-tokens", type=int, default=8192, help="of each rank, for utilisation")
    parser.add_argument("--traced-experts", type=int, default=64, help="for utilisation")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--passes", type=int, default=20, help="of each trace, the last of which is told")
    parser.add_argument("--repeats", type=int, default=5, help="traces, whose medians are kept with all of them")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one command")
    parser.add_argument("--machine", help="name of the machine, for utilisation (default: what memory found)")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--memory-json", type=pathlib.Path, default=pathlib.Path("thesis_memory.json"))
    parser.add_argument("--utilisation-json", type=pathlib.Path, default=pathlib.Path("thesis_utilisation.json"))
    args = parser.parse_args(words)
    args.stages = args.stages or list(STAGES)
    for stage in args.stages:
        if stage not in STAGES:
            parser.error(f"stage '{stage}' is unknown; the stages are {', '.join(STAGES)}")
    least = min([args.ranks, args.passes, args.repeats, args.traced_tokens, *args.tokens, *args.experts])
    if least < 1:
        parser.error(f"{least} is among the numbers; use 1 or more")
    return args


def main():
    args = parse(sys.argv[1:])
    problems, machine = [], args.machine

    def attempt(make, path, text):
        """Keeps the row that `make` returns, or tells why there is none."""
        try:
            row = make()
        except Failed as problem:
            problems.append(problem)
            print(f"thesis_tables: {problem}", file=sys.stderr, flush=True)
            return None
        merge(path, [row], KEY)
        print(f"{row['tokens_per_rank']:>6} tokens {row['experts']:>4} experts   {text(row)}", flush=True)
        return row

    def memory_text(row):
        return f"heap {row['heap_reserved_bytes'] * 1e-6:.1f} MB, workspace {row['workspace_bytes'] * 1e-6:.1f} MB"

    def utilisation_text(row):
        return f"active {100 * row['active']:.1f} %, busy {100 * row['busy']:.1f} %"

    if "memory" in args.stages:
        for tokens in args.tokens:
            for experts in args.experts:
                row = attempt(lambda: memory_row(args, tokens, experts), args.memory_json, memory_text)
                machine = machine or (row and row["machine"])
    if "utilisation" in args.stages:
        attempt(lambda: utilisation_row(args, args.traced_tokens, args.traced_experts, machine), args.utilisation_json,
                utilisation_text)
    if all(isinstance(problem, NotBuilt) for problem in problems):
        return SKIPPED if problems else 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
