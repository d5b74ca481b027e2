#!/usr/bin/env python3
"""Rewrites the generated parts of README.md and docs/: tables from results/, code from examples/.

    scripts/tables.py            rewrite
    scripts/tables.py --check    exit 1 if anything would change

A part stands between <!-- begin: NAME --> and <!-- end: NAME -->. The tables are in lab/result_tables/.
"""

import re
import sys

from generated import ROOT, write_or_check

sys.path += [str(ROOT / "lab"), str(ROOT / "bench")]

from result_tables.common import RESULTS, for_each_card
from result_tables.four_gpus import four_flashinfer, four_published, ranks_rivals, scaling_table, skewed_table
from result_tables.frameworks import check_hf, engines_table, transformers_table
from result_tables.layers import (
    FP8_SCALES, astero_table, comparisons_table, cpu_table, four_bit_table, gpu_table,
    products_table, ranks_table, sonic_moe_table,
)
from result_tables.parts import (
    all_to_all_table, exchange_table, failure_trials_table, grouped_table, hosts_chaos_table,
    hosts_on_paper_table, hosts_table, stragglers_table,
)
from result_tables.thesis import (
    thesis_beside, thesis_bytes, thesis_launches, thesis_memory, thesis_times, thesis_utilisation,
)
from result_tables.tuner import tuner_table


def example(path):
    """The part of an example between its "README: begin" and "README: end" lines."""
    text = (ROOT / path).read_text()
    return "```cpp\n" + re.search(r"// README: begin\n(.*?)// README: end\n", text, re.S)[1].strip() + "\n```"


def run_output():
    path = RESULTS / "run.txt"
    return "```\n" + path.read_text().rstrip() + "\n```" if path.exists() else ""


def parts():
    """{NAME: text}"""
    return {
        "run": run_output(),
        "comparisons": comparisons_table(),
        "example": example("examples/forward/main.cpp"),
        "check-hf": check_hf(),
        "transformers": transformers_table(),
        "engines": engines_table(),
        "cpu": cpu_table(),
        "one_gpu_bf16": for_each_card("one_gpu_bf16.json", lambda: gpu_table("one_gpu_bf16", "One {card}, bf16, gate and combine included.")),
        "one_gpu_fp8": for_each_card("one_gpu_fp8.json", lambda: gpu_table(
            "one_gpu_fp8", "One {card}, FP8, gate, quantisation and combine included.", FP8_SCALES
        )),
        "one_gpu_fp8_more": for_each_card("one_gpu_fp8_more.json", lambda: gpu_table("one_gpu_fp8_more", "One {card}, FP8, four models with fewer and larger experts.")),
        "four_bit": for_each_card("four_bit.json", four_bit_table),
        "products": products_table(),
        "grouped": for_each_card("grouped.json", lambda: grouped_table("grouped.json")),
        "grouped_quack": for_each_card("grouped_quack.json", lambda: grouped_table("grouped_quack.json")),
        "sonic_moe": sonic_moe_table(),
        "exchange": for_each_card("exchange.json", exchange_table),
        "all_to_all": for_each_card("all_to_all.json", all_to_all_table),
        "hosts": hosts_table(),
        "hosts_on_paper": hosts_on_paper_table(),
        "hosts_chaos": hosts_chaos_table(),
        "failure_trials": failure_trials_table(),
        "astero": astero_table(),
        "ep_fp8": for_each_card("ep_fp8.json", lambda: ranks_table("ep_fp8", "FP8, dispatch and combine inside the kernel.")),
        "ep_bf16": for_each_card("ep_bf16.json", lambda: ranks_table("ep_bf16", "bf16, dispatch and combine inside the kernel.")),
        "ep_four_bit": for_each_card("ep_four_bit.json", lambda: ranks_table("ep_four_bit", "Weights of four bits, dispatch and combine inside the kernel.")),
        "ep_thesis": for_each_card("ep_thesis.json", lambda: ranks_table("ep_thesis", "FlashDMoE's layer, bf16.")),
        "two_rivals": ranks_rivals(2),
        "four_rivals": ranks_rivals(4),
        "four_flashinfer": four_flashinfer(),
        "four_published": four_published(),
        "scaling": scaling_table(),
        "ep_skewed": skewed_table(),
        "one_gpu_thesis": for_each_card("one_gpu_thesis.json", lambda: gpu_table("one_gpu_thesis", "FlashDMoE's layer on one {card}, bf16.")),
        "thesis_times": thesis_times(),
        "thesis_beside": thesis_beside(),
        "thesis_launches": thesis_launches(),
        "thesis_bytes": thesis_bytes(),
        "thesis_utilisation": thesis_utilisation(),
        "thesis_memory": thesis_memory(),
        "stragglers": stragglers_table(),
        "tuner_fp8": tuner_table("grouped_fp8"),
        "tuner_bf16": tuner_table("grouped_bf16"),
    }


def main():
    made = parts()
    pages = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
    for path in pages:
        for name, text in made.items():
            pages[path] = re.sub(
                rf"<!-- begin: {name} -->.*?<!-- end: {name} -->",
                lambda _: f"<!-- begin: {name} -->\n{text + chr(10) if text else ''}<!-- end: {name} -->",
                pages[path],
                flags=re.S,
            )
    return write_or_check(pages)


if __name__ == "__main__":
    sys.exit(main())
