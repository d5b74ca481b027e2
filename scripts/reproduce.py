#!/usr/bin/env python3
"""Measures what this machine can show of four texts' tables and figures, and puts it beside theirs on one page.

    scripts/reproduce.py thesis|ramp|astero|all-to-all|engines|all      measure, then write the page
    scripts/reproduce.py all --from results                             the page of committed rows; nothing runs

Without a GPU sizes are small, and everything takes some minutes; on GPUs they are the texts'. Rows and the page go to
--out (build/reproduce), never to results/. The page has for each item of docs/evidence.md theirs, ours, the ratio, the
machine, the commit, the command and a chart, or why it is not shown.

Exit codes: 0 done; 1 a measurement failed, which the page tells too; 2 unusable arguments.
"""

import argparse
import dataclasses
import html
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from generated import ROOT

sys.path += [str(ROOT / "lab"), str(ROOT / "bench")]

from result_rows import commit_here
from result_tables.evidence import EXTRACTORS, Measured
from script_arguments import SKIPPED

HEADINGS = {"thesis": "FlashDMoE, the thesis", "ramp": "RaMP", "astero": "AsteroMoE", "all-to-all": "The all-to-all text"}
TITLES = {**HEADINGS, "engines": "Serving engines"}
ENGINES_NOTE = "This is no text of the four: theirs is the time of the engine's own kernels, so there is only the ratio."


@dataclasses.dataclass
class Step:
    words: list  # the command line
    needs: tuple = ()  # modules of Python


# The steps that measure, for processors and for GPUs.


def cpu_steps(call, script, out):
    small = ["--backend", "cpu", "--ranks", "2"]
    return {
        "thesis": [
            call("bench", "layers", "--suite", "thesis", "--backend", "cpu", "--tokens", "1024,2048", "--repeat", "3", "--json", out / "thesis.json"),
            script("thesis_tables.py", "memory", "utilisation", *small, "--tokens", "1024", "--experts", "16,64", "--traced-tokens", "512",
                   "--traced-experts", "16", "--passes", "5", "--repeats", "3", "--memory-json", out / "thesis_memory.json",
                   "--utilisation-json", out / "thesis_utilisation.json"),
            call("bench", "late", *small, "--model", "thesis", "--tokens", "256", "--late", "2000,20000", "--repeat", "5", "--json", out / "late.json"),
            script("stragglers.py", "--cpu", "--tokens", "64", "--experts", "8", "--passes", "5", "--seeds", "0", "--json", out / "stragglers.json",
                   needs=("torch", "safetensors")),
        ],
        "ramp": [
            call("tune", "--kernel", "grouped", "--backend", "cpu", "--models", "ramp-olmoe", "--tokens", "8,32,128", "--balancedness", "0.5,0.65,1",
                 "--test-tokens", "64", "--test-balancedness", "0.5,0.8", "--repeat", "3", "--out", out / "grouped_bf16"),
            call("tune", "--evaluate", out / "grouped_bf16.profile.json", "--json", out / "ramp.json", "--regions", out / "ramp_regions.json"),
        ],
        "astero": [call("bench", "grouped", "--backend", "cpu", "--quick", "--json", out / "grouped.json")],
        "all-to-all": [call("bench", "all_to_all", "--backend", "cpu", "--ranks", "8", "--quick", "--json", out / "all_to_all.json")],
        "engines": [],
    }


def gpu_steps(call, script, out, gpus):
    ranks = ["--backend", "cuda", "--ranks", str(gpus)]
    several = [
        call("bench", "late", *ranks, "--json", out / "late.json"),
        script("stragglers.py", "--ranks", str(gpus), "--passes", "25", "--seeds", "0", "--json", out / "stragglers.json",
               needs=("torch", "safetensors")),
    ]
    return {
        "thesis": [
            call("bench", "layers", "--suite", "thesis", *ranks, "--json", out / "thesis.json"),
            script("thesis_tables.py", "memory", "utilisation", *ranks, "--memory-json", out / "thesis_memory.json",
                   "--utilisation-json", out / "thesis_utilisation.json"),
            *(several if gpus > 1 else []),
        ],
        "ramp": [
            call("tune", "--kernel", "grouped", "--backend", "cuda", "--dtype", "fp8", "--out", out / "grouped_fp8", "--quick", "--prune", "0.25", "--budget", "320"),
            call("tune", "--evaluate", out / "grouped_fp8.profile.json", "--json", out / "ramp.json", "--regions", out / "ramp_regions.json",
                 "--measured-constants"),
        ],
        "astero": [
            call("bench", "layers", "--suite", "astero", "--dtype", "fp8", "--repeat", "20", "--graph", "--json", out / "astero.json"),
            call("bench", "grouped", "--backend", "cuda", "--quick", "--json", out / "grouped.json"),
            script("sonic_moe.py", "--json", out / "sonic_moe.json", needs=("torch", "sonicmoe")),
        ],
        "all-to-all": [call("bench", "all_to_all", "--backend", "cuda", "--ranks", "8", "--json", out / "all_to_all.json")],
        "engines": [script("engines.py", "olmoe:fp8:triton", "olmoe:fp8:deep_gemm", "olmoe:fp8:switchyard", "--do", "times",
                           "--json", out / "engines.json", needs=("vllm",))],
    }


def count_gpus():
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def steps_of(args):
    commit = ["--commit", args.commit]
    takes_commit = {"stragglers.py", "thesis_tables.py", "engines.py", "sonic_moe.py"}

    def call(*words):
        told = [] if "tune" in words and "--evaluate" not in words else commit
        return Step([args.command, *map(str, words), *told])

    def script(name, *words, needs=()):
        named = ["--command", args.command] if name == "thesis_tables.py" else []
        return Step([sys.executable, str(ROOT / "bench" / name), *map(str, words), *named, *(commit if name in takes_commit else [])], needs)

    return gpu_steps(call, script, args.out, args.gpus) if args.gpus else cpu_steps(call, script, args.out)


def shown_words(words):
    """A command line without this machine's directories."""
    words = [pathlib.Path(word).name if word.startswith("/") else word for word in words]
    return " ".join(word for word in words if word != pathlib.Path(sys.executable).name)


def run_steps(args):
    """Runs the steps of all texts. Returns {text: [a sentence for each step that gave nothing]}."""
    library = pathlib.Path(args.command).resolve().parent.parent / "c_api/libswitchyard_c.so"
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "SWITCHYARD_COMMAND": args.command,
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))}
    if library.exists():
        environment.setdefault("SWITCHYARD_LIBRARY", str(library))
    problems = {}
    all_steps = steps_of(args)
    for text in args.texts:
        problems[text] = []
        for step in all_steps[text]:
            name = shown_words(step.words)
            absent = [module for module in step.needs if importlib.util.find_spec(module) is None]
            if absent:
                problems[text].append(f"Not run, because Python has no {', '.join(absent)}: {name}")
                continue
            began = time.monotonic()
            print(f"\n== {text}: {name}", flush=True)
            try:
                done = subprocess.run(step.words, env=environment, timeout=args.limit, check=False)
                lacks = "Not all of it was run, because this build or machine lacks something, as the program said"
                said = {0: "", SKIPPED: lacks}.get(done.returncode, f"Failed, ended with {done.returncode}")
            except subprocess.TimeoutExpired:
                said = f"Failed, took longer than --limit {args.limit:g} s"
            if said:
                problems[text].append(f"{said}: {name}")
            print(f"== {time.monotonic() - began:.0f} s{'; ' + said if said else ''}", flush=True)
    return problems


# The page.


def evidence_items(text):
    """[(item, what it shows or theirs, state)] of a text's tables in docs/evidence.md."""
    page = (ROOT / "docs/evidence.md").read_text()
    section = re.search(rf"^## {re.escape(HEADINGS[text])}\n(.*?)(?=^## |\Z)", page, re.S | re.M)[1]
    found = []
    for table in re.findall(r"((?:^\|.*\n)+)", section, re.M):
        heads, _, *lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|\n"))] for line in table.splitlines()]
        if "state" not in heads:
            continue
        told = heads.index("shows") if "shows" in heads else None
        for cells in lines:
            found.append((cells[0], cells[told] if told is not None else "", cells[heads.index("state")]))
    return found


def number(value):
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def chart(lines):
    """Theirs as a ring and ours as a dot, a row for each line, on one logarithmic axis."""
    values = [value for line in lines for value in (line.theirs, line.ours) if value and value > 0]
    if not values:
        return ""
    low, high = min(values) / 1.15, max(values) * 1.15
    width, row, left, right, top = 360, 22, 26, 66, 24

    def x(value):
        return left + (width - left - right) * math.log(value / low) / math.log(high / low)

    height = top + row * len(lines) + 6
    parts = [f'<svg class="reproduced" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
             'aria-label="Theirs as rings and ours as dots; the numbers are in the table">',
             f'<circle class="theirs" cx="{left}" cy="10" r="4.5"/><text x="{left + 9}" y="14">theirs</text>'
             f'<circle class="ours" cx="{left + 62}" cy="10" r="4.5"/><text x="{left + 71}" y="14">ours, {html.escape(lines[0].unit or "number")}; '
             'logarithmic</text>']
    for i, line in enumerate(lines):
        y = top + row * (i + 0.5)
        both = [value for value in (line.theirs, line.ours) if value and value > 0]
        parts.append(f'<text x="2" y="{y + 4:.1f}">{i + 1}</text>')
        if not both:
            parts.append(f'<text x="{left}" y="{y + 4:.1f}">{number(line.ours)}, not on this axis</text>')
            continue
        parts.append(f'<line x1="{x(min(both)):.1f}" x2="{x(max(both)):.1f}" y1="{y}" y2="{y}"/>')
        if line.theirs:
            parts.append(f'<circle class="theirs" cx="{x(line.theirs):.1f}" cy="{y}" r="4.5"/>')
        if line.ours > 0:
            parts.append(f'<circle class="ours" cx="{x(line.ours):.1f}" cy="{y}" r="4.5"/>')
        parts.append(f'<text x="{max(map(x, both)) + 9:.1f}" y="{y + 4:.1f}">{number(line.ours)}</text>')
    return "".join([*parts, "</svg>"])


def lines_html(lines):
    """A table, its chart and where our numbers come from."""
    rows = []
    for i, line in enumerate(lines):
        ratio = number(line.ratio)
        unit = f" {line.unit}" if line.unit else ""
        theirs = number(line.theirs) + (unit if line.theirs is not None else "")
        rows.append(f"<tr><td>{i + 1}</td><td>{html.escape(line.point)}</td><td>{theirs}</td><td>{number(line.ours)}{unit}</td><td>{ratio}</td></tr>")
    runs = {}
    for line in lines:
        row = line.row
        runs.setdefault((row["machine"], row.get("commit", "unknown")), []).append(row["command"])
    told = "".join(f"<li>{html.escape(machine)}; commit {html.escape(commit)}; " +
                   ", ".join(f"<code>{html.escape(shown_words(command.split()))}</code>" for command in list(dict.fromkeys(commands))[:3]) +
                   (", …" if len(set(commands)) > 3 else "") + "</li>" for (machine, commit), commands in runs.items())
    return ('<div class="scroll"><table><thead><tr><th></th><th>point</th><th>theirs</th><th>ours</th><th>ours / theirs</th></tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table></div>{chart(lines)}<ul class="origin">{told}</ul>')


def text_parts(text, measured, problems):
    """[(level, heading, HTML)] of a text, and (items shown, all items)."""
    extractors = EXTRACTORS[text]
    items = evidence_items(text) if text in HEADINGS else [(name, "", "") for name in extractors]
    unknown = set(extractors) - {name for name, _, _ in items}
    if unknown:
        raise SystemExit(f"reproduce: docs/evidence.md has no item {', '.join(sorted(unknown))}")
    parts, missing = [], []
    for name, shows, state in items:
        lines = extractors[name].extract(measured) if name in extractors else []
        if lines:
            said = f'<p class="state">State: {html.escape(state)}</p>' if state else ""
            parts.append((3, f"{name}: {shows}" if shows else name, said + lines_html(lines)))
        else:
            why = f"no rows; needs {extractors[name].needs}" if name in extractors else state
            missing.append(f"<tr><td>{html.escape(name)}</td><td>{html.escape(shows)}</td><td>{html.escape(why)}</td></tr>")
    shown = len(parts)
    intro = "".join(f'<p class="problem">{html.escape(problem)}</p>' for problem in problems)
    intro += f"<p>{ENGINES_NOTE}</p>" if text == "engines" else ""
    parts.insert(0, (2, TITLES[text], intro))
    if missing:
        parts.append((3, f"{TITLES[text]}: not shown here", '<div class="scroll"><table><thead><tr><th>item</th><th>shows</th><th>why, or its '
                      f'state in the evidence table</th></tr></thead><tbody>{"".join(missing)}</tbody></table></div>'))
    return parts, (shown, len(items))


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1000px; padding: 16px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid #8884; vertical-align: top; }
.problem { color: #c0392b; } .origin { font-size: 13px; overflow-wrap: anywhere; }
"""
CHART_STYLE = """
svg.reproduced { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg.reproduced text { fill: currentColor; }
svg.reproduced line { stroke: currentColor; stroke-opacity: 0.35; stroke-width: 2; }
svg.reproduced .theirs { fill: none; stroke: #bc4c00; stroke-width: 2; } svg.reproduced .ours { fill: #2f81d7; }
"""


def page_of(args, measured, problems):
    """The page as HTML, or as Markdown with HTML in it for the site."""
    parts, summary = [], []
    for text in args.texts:
        of_text, (shown, all_items) = text_parts(text, measured, problems.get(text, []))
        parts += of_text
        summary.append(f"<tr><td>{TITLES[text]}</td><td>{shown}</td><td>{all_items}</td></tr>")
    how = f"Rows of {args.source.name}/; nothing was run." if args.source else \
        f"Measured with {args.gpus} GPUs, at the texts' sizes." if args.gpus else "Measured without a GPU, at small sizes."
    intro = (f"<p>{how} Theirs is copied from the texts. A ratio is ours over theirs. There is none where one of the two "
             "is of fp32, or of a processor. A ratio of times below 1 means that ours is faster.</p>"
             '<table><thead><tr><th>text</th><th>items shown</th><th>of</th></tr></thead><tbody>' + "".join(summary) + "</tbody></table>")
    title = "Theirs and ours"
    if args.markdown:
        return f"# {title}\n\n<style>{CHART_STYLE}</style>\n\n{intro}\n\n" + "".join(f"{'#' * level} {name}\n\n<div>{body}</div>\n\n" for level, name, body in parts)
    body = "".join(f"<h{level}>{html.escape(name)}</h{level}>\n{content}\n" for level, name, content in parts)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{STYLE}{CHART_STYLE}</style></head><body><h1>{title}</h1>\n{intro}\n{body}</body></html>\n")


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help=f"{', '.join(EXTRACTORS)} or all")
    parser.add_argument("--from", dest="source", type=pathlib.Path, metavar="DIR", help="render the rows of this directory; measure nothing")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/reproduce", help="for rows and the page (default build/reproduce)")
    parser.add_argument("--command", default=str(ROOT / "build/src/cli/switchyard"), help="the built command")
    parser.add_argument("--small", action="store_true", help="measure on the processor, also where there are GPUs")
    parser.add_argument("--markdown", action="store_true", help="write a page for the site in place of HTML")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="for each measurement (default 900)")
    parser.add_argument("--commit", help="to note in the rows (default: what git says)")
    args = parser.parse_args(words)
    for text in args.texts:
        if text != "all" and text not in EXTRACTORS:
            parser.error(f"text '{text}' is unknown; the texts are {', '.join(EXTRACTORS)}, and all of them are 'all'")
    args.texts = list(EXTRACTORS) if "all" in args.texts else list(dict.fromkeys(args.texts))
    args.out = args.out.resolve()
    if args.out == ROOT / "results":
        parser.error("--out is results/, whose rows are committed; name another directory, and copy what you want to keep")
    if args.source and not args.source.is_dir():
        parser.error(f"--from is {args.source}, which is no directory; name one with rows, such as results")
    if not args.source and not shutil.which(args.command):
        parser.error(f"--command is {args.command}, which cannot be run; build it (README.md), or render committed rows by --from results")
    args.commit = args.commit or commit_here()
    args.gpus = 0 if args.small or args.source else count_gpus()
    return args


def main():
    args = parse(sys.argv[1:])
    args.out.mkdir(parents=True, exist_ok=True)
    problems = {} if args.source else run_steps(args)
    measured = Measured(args.source or args.out, ROOT / "results/published.json")
    page = args.out / ("reproduced.md" if args.markdown else "index.html")
    page.write_text(page_of(args, measured, problems))
    print(f"\n{page}")
    failed = [problem for of_text in problems.values() for problem in of_text if problem.startswith("Failed")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
