"""Tables of documents, made of rows that nobody has measured."""

import sys

import pytest

from conftest import ROOT

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "lab"), str(ROOT / "bench")]

import tables  # noqa: E402
from result_tables import common  # noqa: E402

OTHER_COMMIT, OTHER_COMMAND = "0123abc", "switchyard bench --suite of_more_ranks"


def of_more_ranks(row):
    """The same point as it would come from a machine with three times as many GPUs, seven times as slow."""
    slower = {name: 7 * row[name] for name in ("median_us", "p10_us", "p90_us", "rival_us")
              if isinstance(row.get(name), (int, float))}
    ranks = 3 * row["ranks"]
    more = {"ranks": ranks, "machine": f"{ranks} x {common.card_of(row['machine'])}, 132 SMs, CUDA 13.0",
            "commit": OTHER_COMMIT, "command": OTHER_COMMAND}
    return {**row, **slower, **more, **({"gpus": ranks} if row.get("gpus") else {})}


def with_more_ranks(rows):
    several = [row for row in rows if isinstance(row, dict) and row.get("ranks", 1) > 1 and "NVIDIA" in row.get("machine", "")]
    return [*rows, *map(of_more_ranks, several)]


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]


def is_measured(line):
    """Heads get columns where rows of more ranks stand beside others."""
    return any(character.isdigit() for character in line)


def test_rows_of_more_ranks_change_no_other_row(monkeypatch):
    """A table whose key lacks the ranks would show the last rows under a text that is about the first."""
    before = tables.parts()
    read = common.read
    monkeypatch.setattr(common, "read", lambda name: with_more_ranks(rows) if isinstance(rows := read(name), list) else rows)
    after = tables.parts()
    grown = 0
    for name, text in before.items():
        cells = {tuple(line.strip("| ").split(" | ")) for line in table_lines(after[name])}
        for line in table_lines(text):
            if is_measured(line):
                own = line.strip("| ").split(" | ")
                assert any(is_subsequence(own, others) for others in cells), f"{name}: {line}"
        summaries = [line for line in text.splitlines() if "geometric mean" in line]
        assert set(summaries) <= set(after[name].splitlines()), f"{name}: a mean over other numbers of ranks"
        if len(table_lines(after[name])) > len(table_lines(text)) and "; commit " in text:
            grown += 1
            assert OTHER_COMMIT in after[name] and OTHER_COMMIT not in text, f"{name} does not name the commit of its other run"
            assert OTHER_COMMAND in after[name], f"{name} does not name the command of its other run"
    assert grown >= 6


def is_subsequence(few, many):
    rest = iter(many)
    return all(cell in rest for cell in few)


def row(**fields):
    return {"machine": "NVIDIA H200, 132 SMs, CUDA 13.0", "commit": "a", "command": "switchyard bench", "median_us": 10,
            "floor_us": 5, "rival": None, "rival_us": None, **fields}


def test_every_run_is_named():
    said = common.gpu_provenance([
        row(), row(command="switchyard bench --tokens 1"), row(),
        row(machine="4 x NVIDIA H200, 132 SMs, CUDA 13.0", commit="b", command="switchyard bench --ranks 4"),
    ])
    assert said == (
        "*NVIDIA H200, 132 SMs, CUDA 13.0; commit a; `switchyard bench`, `switchyard bench --tokens 1`*\n\n"
        "*4 x NVIDIA H200, 132 SMs, CUDA 13.0; commit b; `switchyard bench --ranks 4`*"
    )


def test_speed_ups_name_their_rival():
    torch = [row(rival="torch 2.11.0 compiled", rival_us=20), row(rival="torch 2.11.0 ordered", rival_us=30)]
    said = common.gpu_summary([*torch, row(rival="sgl-deep-gemm 0.1.4", rival_us=8), row()])
    assert "Speed-up over PyTorch: geometric mean 2.45×, least 2.00× (2 points)." in said
    assert "Speed-up over sgl-deep-gemm 0.1.4: geometric mean 0.80×, least 0.80× (1 points)." in said
    assert "(4 points)" in said  # that have a floor


def test_two_rows_of_one_key_are_refused():
    with pytest.raises(ValueError, match="two rows of 4"):
        common.keyed([row(experts=4), row(experts=4, command="b")], lambda each: each["experts"])
