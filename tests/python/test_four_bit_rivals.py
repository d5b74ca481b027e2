"""bench/four_bit_rivals.py on the processor: its weights, its reference, and whom it takes for the fastest."""

import json

import pytest

from conftest import ROOT, python

pytest.importorskip("torch")

SCRIPT = ROOT / "bench" / "four_bit_rivals.py"


def test_its_reference_and_bounds_hold(tmp_path):
    lines = python(SCRIPT, "--check", "--from", tmp_path / "nothing").stdout.splitlines()
    assert len(lines) > 10 and all(line.startswith("ok ") for line in lines), lines


def test_a_point_gets_its_fastest_rival_of_the_same_card(tmp_path):
    h200, h100 = "NVIDIA H200, 132 SMs, CUDA 13.0", "NVIDIA H100 80GB HBM3, 132 SMs, CUDA 13.0"
    point = dict(model="kimi-k3", experts=56, weights="mxfp4")

    def ours(machine, tokens):
        none = dict.fromkeys(["rival", "rival_us", "rival_p10_us", "rival_p90_us"])
        return dict(machine=machine, **point, tokens_per_rank=tokens, median_us=10.0, **none, error=None)

    def theirs(machine, version, us, tokens=8, tokens_in="bf16"):
        return dict(machine=machine, **point, tokens=tokens, version=version, tokens_in=tokens_in,
                    median_us=us, times_us=[us - 1, us, us + 2])

    rows, rivals = tmp_path / "rows.json", tmp_path / "rivals.json"
    rows.write_text(json.dumps([ours(h200, 8), ours(h200, 64), ours(h100, 8)]))
    rivals.write_text(json.dumps([
        theirs(h200, "A 1", 20.0), theirs(h200, "B 2", 15.0, tokens_in="fp8"), theirs(h100, "A 1", 30.0),
        theirs(h200, "A 1", 5.0, tokens=1),
    ]))
    python(SCRIPT, "--json", rivals, "--join", rows)
    first, without, other = json.loads(rows.read_text())
    assert (first["rival"], first["rival_us"]) == ("B 2, FP8", 15.0)
    assert (first["rival_p10_us"], first["rival_p90_us"]) == (14.0, 17.0)
    assert without["rival"] is None and without["rival_us"] is None
    assert (other["rival"], other["rival_us"]) == ("A 1", 30.0)
    # In the order of the fields that the command writes.
    assert list(first) == list(without)
