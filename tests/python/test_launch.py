"""`switchyard launch` in place of torchrun."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from conftest import python, started
from switchyard.__main__ import _command

torch = pytest.importorskip("torch")

# Variables that torchrun gives its ranks. TORCHELASTIC_USE_AGENT_STORE is missing on purpose: with it rank 0 would wait
# for a store that torchrun itself serves.
VARIABLES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID"
).split()


def launch(tmp_path, ranks, script, *options, **environment):
    path = tmp_path / "rank.py"
    path.write_text(script)
    return started(_command(), "launch", "-n", ranks, *options, "--", sys.executable, path, **environment)


SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(sum)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {sum.item()}, {dist.is_torchelastic_launched()}\\n", end="")
dist.destroy_process_group()
"""


def test_torch_distributed_starts(tmp_path):
    done = launch(tmp_path, 2, SUM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0, True", "rank 1 of 2: 3.0, True"]


def test_an_outer_jobs_variables_do_not_reach_the_ranks(tmp_path):
    """As under torchrun, whose agent serves a store for other ranks, at a port that is taken here."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = launch(
            tmp_path, 2, SUM, MASTER_PORT=str(taken.getsockname()[1]),
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="outer",
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 3.0, True") == 2


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode != 0,
    reason="needs root and iproute2, for network namespaces",
)
def test_torch_distributed_starts_over_hosts(tmp_path):
    """On each of several hosts the ranks find where rank 0 is."""
    done = launch(tmp_path, 4, SUM, "--namespaces", "2")
    if "namespaces" in done.stderr and done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 10.0, True") == 4


def test_a_port_can_be_given(tmp_path):
    done = launch(tmp_path, 1, "import os; print(os.environ['MASTER_PORT'])", "--master-port", "29717")
    assert done.stdout == "29717\n"


def test_the_variables_are_those_of_torchrun(tmp_path):
    """Asked of torchrun itself, with the values that do not depend on chance."""
    script = "import json, os; print(json.dumps(dict(os.environ)) + '\\n', end='')"
    done = launch(tmp_path, 1, script)
    ours = json.loads(done.stdout)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    theirs = json.loads(python(*torchrun, tmp_path / "rank.py").stdout)
    places = {name for name in theirs if re.search("RANK|WORLD_SIZE|^ROLE|^GROUP|^MASTER|^TORCHELASTIC", name)}
    # Variables of the agent that torchrun is. A variable that a newer torchrun adds has to be thought about.
    assert places - set(VARIABLES) == {
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    }
    assert set(VARIABLES) <= places
    assert not (places - set(VARIABLES)) & set(ours)
    for name in set(VARIABLES) - {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"}:
        assert ours[name] == theirs[name], name


def test_a_group_of_torch_makes_a_world(tmp_path):
    done = launch(
        tmp_path,
        2,
        """
import torch.distributed as dist, switchyard
dist.init_process_group("gloo")
for world in (switchyard.World.from_env(), switchyard.World.from_process_group(dist.group.WORLD)):
    assert (world.rank, world.size) == (dist.get_rank(), 2)
    world.barrier()
print("done\\n", end="")
dist.destroy_process_group()
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\ndone\n"
