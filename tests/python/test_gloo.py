"""Ranks over Gloo end well though its threads are late to free what they worked on: bench/rank_processes.py says why."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from conftest import compiled, launched

HERE = pathlib.Path(__file__).parent
BENCH = HERE.parents[1] / "bench"
FEW = "--model tiny --prompt 9 --decode-prompt 8 --batches 1 --steps 2 --repeats 1 --words 2 --prompts 1".split()
# Scripts, and how many processes are started: some start their ranks themselves.
SCRIPTS = {
    "transformers_e2e": ([BENCH / "transformers_e2e.py", *FEW, "--implementations", "grouped_mm"], 2),
    "hf_ranks": ([HERE / "hf_ranks.py", "tp", "qwen3_moe"], 2),
    "serving_ranks": ([HERE / "serving_ranks.py", "passes"], None),
    "nccl_ranks": ([HERE / "nccl_ranks.py", "--cpu", "--seconds", "1", "--tokens", "9"], None),
    "stragglers": ([BENCH / "stragglers.py", *"--cpu --tokens 8 --experts 8 --passes 2 --warm-ups 1 --seeds 0".split()], None),
}


@pytest.fixture(scope="module")
def late_gloo(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("late"), "late_gloo.so", (HERE / "late_gloo.c").read_text(), "-ldl")


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_end_well(name, late_gloo, monkeypatch):
    command, ranks = SCRIPTS[name]
    if "transformers" in name or "hf" in name:
        pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.setenv("LD_PRELOAD", str(late_gloo))
    monkeypatch.setenv("SWITCHYARD_LATE_GLOO_US", "5000")
    if ranks is not None:
        launched(ranks, *command)
        return
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
