"""Tests of the Python package: of this tree's sources over the library of build/, unless
SWITCHYARD_LIBRARY and PYTHONPATH say otherwise, or SWITCHYARD_TEST_INSTALLED is set."""

import collections
import os
import pathlib
import re
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
# A launcher's variables would make worlds of its ranks.
for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(variable, None)


def pytest_configure(config):
    # The package, its plugins, documents and examples use the names of today.
    config.addinivalue_line("filterwarnings", "error:.* of Experts goes with the next release:DeprecationWarning")


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
