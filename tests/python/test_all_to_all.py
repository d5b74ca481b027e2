"""examples/all_to_all: the problem's cases on ranks that are threads, and its command."""

import argparse
import sys

import pytest
import torch

from conftest import ROOT, python, started

EXAMPLE = ROOT / "examples/all_to_all"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE))
    import problem
    import run

    yield argparse.Namespace(problem=problem, run=run)
    sys.path.remove(str(EXAMPLE))


def arguments(ranks, **more):
    return argparse.Namespace(
        **({"ranks": ranks, "experts": "rank", "padded": False, "repeat": 1, "device": "cpu"} | more)
    )


def worst(outcomes):
    return max(outcome.fault for of_rank in outcomes for outcome in of_rank)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("experts", ["rank", "random"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_small_cases(example, ranks, experts, padded):
    cases = example.problem.TESTS[:4]
    outcomes = example.run.on_threads(cases, arguments(ranks, experts=experts, padded=padded))
    assert [len(of_rank) for of_rank in outcomes] == [4] * ranks
    assert worst(outcomes) <= 1


def test_a_large_case(example):
    case = example.problem.TESTS[5]
    assert worst(example.run.on_threads([case], arguments(8))) <= 1


def test_the_cases_are_the_problems(example):
    cases = example.problem.CASES
    assert len(cases) == 14
    assert [c.speed_of_light_us for c in example.problem.BENCHMARKS] == [6.33, 7.37, 14.98, 61.78, 104.36]
    assert all(c.config.num_experts % 8 == 0 for c in cases)
    data = example.problem.make_rank_data(cases[6], 3, 8)
    assert 1 <= data.num_tokens < 128 and data.x.shape == (data.num_tokens, 4096)
    assert data.x.dtype == torch.float16 and data.indices.dtype == torch.int32
    for row in data.indices.tolist():
        assert len(set(row)) == 8


def test_the_check_sees_faults(example):
    """A token, a weight or an expert that is not the right one is beyond the tolerance."""
    problem, case = example.problem, example.problem.TESTS[5]
    data = problem.make_rank_data(case, 1, 4)
    y = problem.reference(case, data, 4, False).half()
    assert problem.largest_fault(case, data, y, 4, False) <= 0.2
    assert problem.largest_fault(case, data, y.roll(1, dims=0), 4, False) > 10
    assert problem.largest_fault(case, data, y, 2, False) > 10
    assert problem.largest_fault(case, data, y, 4, True) > 10
    assert problem.largest_fault(case, data, y * 1.1, 4, False) > 2
    assert problem.largest_fault(case, data, y.float(), 4, False) == float("inf")


def test_the_command_on_threads_and_processes():
    command = [EXAMPLE / "run.py", "--cases", "0,1", "--repeat", "2"]
    done = started(sys.executable, *command, "--ranks", "3")
    assert done.returncode == 2 and "3 ranks do not divide" in done.stderr, done.stdout + done.stderr
    assert python(*command, "--ranks", "2").stdout.count("ok ") == 2
    python("-m", "switchyard", "launch", "-n", "2", "--", sys.executable, *command)
