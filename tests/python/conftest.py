"""Tests of the Python package: of this tree's sources over the library of build/, unless
SWITCHYARD_LIBRARY and PYTHONPATH say otherwise, or SWITCHYARD_TEST_INSTALLED is set."""

import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
if not os.environ.get("SWITCHYARD_TEST_INSTALLED"):
    os.environ.setdefault("SWITCHYARD_LIBRARY", str(ROOT / "build/src/c_api/libswitchyard_c.so"))
    os.environ.setdefault("SWITCHYARD_COMMAND", str(ROOT / "build/src/cli/switchyard"))
    sys.path.insert(0, str(ROOT / "python"))
    # For the processes that tests start.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
# PyTorch's threads gain nothing with models this small, and spin while they wait for each other: with two threads beside
# other work the tests of transformers' blocks take seven times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A launcher's variables would make worlds of its ranks.
for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(variable, None)
# A shell's background job ignores SIGINT, and so do the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    # The package, its plugins, documents and examples use the names of today.
    config.addinivalue_line("filterwarnings", "error:.* of Experts goes with 0.3:DeprecationWarning")


def scripts():
    """The commands of pyproject.toml: what pip makes scripts of."""
    text = (ROOT / "pyproject.toml").read_text()
    entries = re.search(r"\[project.scripts\]\n((?:.+\n)+)", text)[1]
    return dict(re.findall(r'(\S+) = "(.+)"', entries))


def installed(directory):
    """Puts the entry points of pyproject.toml into a directory, as an installed package has them."""
    text = (ROOT / "pyproject.toml").read_text()
    groups = re.findall(r'\[project.entry-points."(.*)"\]\n((?:.+\n)+)', text)
    info = directory / "switchyard_moe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: switchyard-moe\nVersion: 0\n")
    lines = [f"[{group}]\n{entries}" for group, entries in groups]
    lines += [f"[console_scripts]\n{name} = {target}\n" for name, target in scripts().items()]
    (info / "entry_points.txt").write_text("".join(lines).replace('"', ""))


def started(*command, path=(), timeout=300, cwd=None, **environment):
    """A process that has ended. `path` stands before what PYTHONPATH has."""
    environment = os.environ | environment
    if path:
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment
    )


def python(*words, **how):
    """As `started`, of Python, which must succeed."""
    done = started(sys.executable, *words, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def launched(ranks, script, *words, failing=None, timeout=300):
    """The lines of JSON that each rank of a script wrote: processes with torchrun's variables, which must succeed.
    failing: the rank that kills or stops itself, and is ended when the others have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    command = [sys.executable, *map(str, (script, *words))]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | where | dict(RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(ranks)
    ]
    try:
        waited_for = [process for rank, process in enumerate(processes) if rank != failing]
        # All at once: one that is full of output must not hold up the others.
        with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
            done = list(pool.map(lambda process: process.communicate(timeout=timeout), waited_for))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # Every rank that failed: the others fail because of the first.
    wrong = [out[-1000:] + errors[-3000:] for process, (out, errors) in zip(waited_for, done) if process.returncode]
    assert not wrong, "\n".join(wrong)
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in done]


def compiled(directory, name, source="int nothing;", *options):
    """A shared library of a few lines."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (directory / "source.c").write_text(source)
    path = directory / name
    subprocess.run([compiler, "-shared", "-fPIC", str(directory / "source.c"), "-o", str(path), *options], check=True)
    return path


def in_threads(body, arguments):
    """Calls body(argument) of each on a thread of its own, and raises the first failure."""
    arguments = list(arguments)
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(body, arguments))


def run_ranks(worlds, body):
    """What body(world) returned on each rank, and what it failed with."""
    results, failures = [None] * len(worlds), [None] * len(worlds)

    def rank(world):
        try:
            results[world.rank] = body(world)
        except Exception as failure:
            failures[world.rank] = failure

    in_threads(rank, worlds)
    return results, failures


@pytest.fixture(autouse=True)
def seed():
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped, each reason once, also under -q."""
    reasons = collections.Counter(
        report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
