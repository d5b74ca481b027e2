"""Layers over ranks beside all-reduces of a framework: no order of launches deadlocks or changes a result."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import switchyard

SCRIPT = pathlib.Path(__file__).with_name("nccl_ranks.py")
# Five minutes before a release.
SECONDS = float(os.environ.get("SWITCHYARD_NCCL_SECONDS", "10"))


def run(*arguments, seconds):
    given = [sys.executable, str(SCRIPT), "--seconds", str(seconds), *arguments]
    done = subprocess.run(given, capture_output=True, text=True, timeout=seconds + 240)
    assert done.returncode == 0 and "agrees: " in done.stdout, done.stdout + done.stderr
    print(done.stdout)


def test_gloo():
    run("--cpu", "--tokens", "60", seconds=min(SECONDS, 3))


@pytest.mark.skipif(
    not (torch.cuda.device_count() > 1 and torch.cuda.get_device_capability() == (9, 0) and switchyard.has_cuda()),
    reason="needs two GPUs, H100 or H200, that torch and the library use",
)
@pytest.mark.parametrize("reserved", [2, 8])
def test_nccl(reserved):
    run("--reserved-sms", str(reserved), "--seed", str(reserved), seconds=SECONDS)
