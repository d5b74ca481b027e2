"""bench/thesis_tables.py on the processor: the rows it makes of what the command tells."""

import json
import os
import subprocess
import sys

from conftest import ROOT

SCRIPT = ROOT / "bench" / "thesis_tables.py"


def run(tmp_path, *words, command=None):
    files = ["--memory-json", tmp_path / "memory.json", "--utilisation-json", tmp_path / "utilisation.json"]
    sizes = ["--hidden", "128", "--intermediate", "192", "--backend", "cpu"]
    command = command or os.environ["SWITCHYARD_COMMAND"]
    return subprocess.run([sys.executable, SCRIPT, "--command", command, *sizes, *files, *words],
                          capture_output=True, text=True, timeout=300)


def test_rows_of_memory_and_utilisation(tmp_path):
    points = ["--tokens", "40,80", "--experts", "4,8", "--traced-tokens", "40", "--traced-experts", "8"]
    done = run(tmp_path, *points, "--repeats", "2", "--commit", "abc")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "memory.json").read_text())
    assert [(row["tokens_per_rank"], row["experts"]) for row in rows] == [(40, 4), (40, 8), (80, 4), (80, 8)]
    for row in rows:
        assert row["commit"] == "abc" and row["ranks"] == 2 and row["backend"] == "cpu"
        assert row["token_buffer_bytes"] == row["tokens_per_rank"] * 128 * 2  # of one rank, in bf16
        assert 0 < row["heap_used_bytes"] <= row["heap_reserved_bytes"]
        assert row["workspace_bytes"] > 0 and row["dropped_slots"] == 0
        assert row["dispatch_bytes"] + row["combine_bytes"] < row["padded_all_to_all_bytes"]
    (row,) = json.loads((tmp_path / "utilisation.json").read_text())
    assert 0 < row["busy"] < row["active"] <= 1 and row["units"] >= 2 and row["unit"] == "thread"
    assert len(row["all_busy"]) == len(row["all_active"]) == 2 and row["machine"] == rows[0]["machine"]
    # A point that is measured again replaces its row, and others stay.
    again = run(tmp_path, "memory", "--tokens", "40", "--experts", "4", "--commit", "def")
    assert again.returncode == 0, again.stderr
    commits = [row["commit"] for row in json.loads((tmp_path / "memory.json").read_text())]
    assert commits == ["def", "abc", "abc", "abc"]


def test_failures_are_told(tmp_path):
    done = run(tmp_path, "memory", "--tokens", "4", "--experts", "4", command="/nowhere/switchyard")
    assert done.returncode == 1 and "name the built command with --command" in done.stderr
    done = run(tmp_path, "memory", "--tokens", "4", "--experts", "1")
    assert done.returncode == 1 and "ended with 2: switchyard: error" in done.stderr
    # A kernel that the build lacks is no failure.
    unbuilt = tmp_path / "unbuilt"
    unbuilt.write_text("#!/bin/sh\necho \"build with 'any_plain' in SWITCHYARD_GPU_TRACED_ACTIVATIONS\" >&2\nexit 2\n")
    unbuilt.chmod(0o755)
    done = run(tmp_path, "utilisation", command=unbuilt)
    unbuilt.unlink()
    assert done.returncode == 77 and "'any_plain'" in done.stderr
    done = run(tmp_path, "speed")
    assert done.returncode == 2 and "stage 'speed' is unknown" in done.stderr
    assert not list(tmp_path.iterdir())
