"""scripts/reproduce.py: the four texts' numbers beside rows, which of them a page shows, and what it does not overwrite."""

import json
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "lab"), str(ROOT / "bench")]

import reproduce  # noqa: E402
from result_tables.evidence import EXTRACTORS, Measured  # noqa: E402

SCRIPT = ROOT / "scripts/reproduce.py"
# The captions of the texts.
THESIS = ["Table 1.1", *(f"Table 6.{i}" for i in range(1, 6)), "1.1", "1.2", "1.3", "1.4", "3.1", "3.2", "3.3", "4.1", "4.2", "4.3", "5.1",
          "5.2", "5.3", "6.1", "6.2", "6.3a", "6.3b", "6.4", "A.1"]
RAMP = [*(f"Table {numeral}" for numeral in ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")), *(f"{i}" for i in range(1, 9))]


def run(*words):
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, check=False)


def measured(directory):
    return Measured(directory, ROOT / "results/published.json")


def lines_of(text, item, directory=ROOT / "results"):
    return EXTRACTORS[text][item].extract(measured(directory))


def test_every_caption_has_a_row_in_the_evidence_table():
    for text, captions in (("thesis", THESIS), ("ramp", RAMP)):
        labels = " ".join(name for name, _, _ in reproduce.evidence_items(text))
        for caption in captions:
            assert re.search(rf"(?<![\w.]){re.escape(caption)}(?![\w.]*\w)", labels), f"{text}: {caption}"


def test_every_state_is_one_of_the_pages():
    states = re.findall(r"^\| (reproduced|in part|other machine|not here|not measured|drawing) \|", (ROOT / "docs/evidence.md").read_text(), re.M)
    assert len(states) == 6
    for text in reproduce.HEADINGS:
        for name, _, state in reproduce.evidence_items(text):
            assert any(word in state for word in states), f"{text}, {name}: {state}"


def test_committed_rows_show_every_item_that_has_an_extractor():
    for text, items in EXTRACTORS.items():
        for name, shown in items.items():
            assert shown.extract(measured(ROOT / "results")), f"{text}, {name}"


def test_theirs_and_ours_are_the_numbers_of_the_text_and_of_the_rows():
    [line] = [line for line in lines_of("thesis", "Table 6.3") if "2048 tokens" in line.point and "4 × H200" in line.point and "fp32" in line.point]
    assert (line.theirs, line.ratio) == (1.90, None)
    assert line.ours == pytest.approx(line.row["median_us"] / 1000)
    mean, worst = [line for line in lines_of("ramp", "Table IV") if "grouped_fp8, mixtral" in line.point]
    assert (mean.theirs, worst.theirs) == (1.0, 2.0)
    assert worst.ours > mean.ours > 0
    [line] = [line for line in lines_of("ramp", "Table VII") if "32 tokens" in line.point]
    assert line.theirs == 72 and line.ours == pytest.approx(36.72, abs=0.01)
    assert line.ratio == pytest.approx(0.51)
    assert all(line.theirs == 292 for line in lines_of("all-to-all", "ladder: flattened, v9"))


def test_a_page_of_rows_names_machine_commit_and_command_and_has_no_ratio_over_fp32(tmp_path):
    done = run("thesis", "--from", ROOT / "results", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert "4 x NVIDIA H200, 132 SMs, CUDA 13.0; commit dfe2d85; <code>switchyard bench --suite thesis --backend cuda --ranks 4</code>" in page
    rows = re.findall(r"<tr><td>\d+</td><td>([^<]*FlashDMoE in fp32)</td>.*?<td>([^<]*)</td></tr>", page)
    assert rows and {ratio for _, ratio in rows} == {"–"}
    assert re.search(r"<td>Figure 6.4</td>.*needs RDMA NICs", page)
    assert page.count("<svg") == len(EXTRACTORS["thesis"])


def test_what_has_no_rows_says_what_it_needs(tmp_path):
    (tmp_path / "rows").mkdir()
    done = run("all", "--from", tmp_path / "rows", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert "<svg" not in page
    assert "no rows; needs a GPU and vLLM" in page


def test_a_measurement_that_fails_is_on_the_page_and_in_the_exit_code(tmp_path):
    failing = tmp_path / "switchyard"
    failing.write_text("#!/bin/sh\nexit 3\n")
    failing.chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "results").iterdir()}
    done = run("all-to-all", "--small", "--command", failing, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "Failed, ended with 3: switchyard bench all_to_all" in (tmp_path / "out/index.html").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "results").iterdir()}


def test_a_measurement_that_this_build_lacks_is_no_failure(tmp_path):
    command = tmp_path / "switchyard"
    command.write_text("#!/bin/sh\nexit 77\n")
    command.chmod(0o755)
    done = run("all-to-all", "--small", "--command", command, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "lacks something, as the program said: switchyard bench all_to_all" in (tmp_path / "out/index.html").read_text()


@pytest.mark.parametrize("words, told", [
    (["ramps"], "text 'ramps' is unknown"),
    (["all", "--out", str(ROOT / "results")], "--out is results/"),
    (["all", "--from", "/nowhere"], "--from is /nowhere"),
    (["all", "--command", "/nowhere/switchyard"], "--command is /nowhere/switchyard"),
])
def test_unusable_arguments_are_named(words, told):
    done = run(*words)
    assert done.returncode == 2
    assert told in done.stderr


def test_every_step_writes_into_the_directory_that_was_given(tmp_path):
    for gpus in (0, 1, 4):
        args = reproduce.parse(["all", "--from", str(ROOT / "results"), "--out", str(tmp_path)])
        args.gpus = gpus
        for text, steps in reproduce.steps_of(args).items():
            for step in steps:
                outputs = [step.words[i + 1] for i, word in enumerate(step.words) if word in ("--json", "--regions", "--out") or word.endswith("-json")]
                assert outputs and all(path.startswith(str(tmp_path)) for path in outputs), f"{text}: {step.words}"


def test_rows_of_a_processor_have_no_ratio_of_times(tmp_path):
    row = {"machine": "Intel(R) Xeon(R) Processor, 2 hardware threads", "commit": "abc", "command": "switchyard bench", "ranks": 8, "gpus": None,
           "stand_in": "rank", "rung": "fused", "median_us": 100.0, "case": "a", "floor_us": None, "hidden": 2048}
    (tmp_path / "all_to_all.json").write_text(json.dumps([row]))
    [line] = lines_of("all-to-all", "ladder: experts fused (in the text only)", tmp_path)
    assert (line.theirs, line.ratio) == (421, None)
    assert line.ours == pytest.approx(100)
    assert "CPU" in line.point


@pytest.mark.parametrize("kernel", ["grouped_fp8", "grouped_bf16"])
def test_the_committed_profiles_replay_the_tuner_page(kernel, tmp_path):
    """`tune --evaluate` of a committed profile gives the rows from which the page's tables are made."""
    command = os.environ["SWITCHYARD_COMMAND"]
    if not os.path.exists(command):
        pytest.skip(f"{command} is not built")
    written = tmp_path / "ramp.json"
    subprocess.run([command, "tune", "--evaluate", ROOT / f"results/profiles/{kernel}.profile.json", "--measured-constants", "--json", written],
                   capture_output=True, check=True)
    told = {"commit", "command"}
    replayed = [{key: value for key, value in row.items() if key not in told} for row in json.loads(written.read_text())]
    kept = [{key: value for key, value in row.items() if key not in told} for row in json.loads((ROOT / "results/ramp.json").read_text())
            if row["kernel"] == kernel and row["generator"] == "distinct"]
    assert len(kept) > 90
    assert replayed == kept


def test_a_machine_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reproduce.commit_here() == "unknown"
