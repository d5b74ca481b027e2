"""What the command and the package say, read in their sources: texts that no run in a test would show."""

import pathlib
import re

import pytest

import switchyard

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Rooms whose texts people read at the command line. Counts go through plural() there.
ROOMS = ["lab/cli", "lab/run", "lab/report", "lab/machine", "lab/bench", "lab/common", "lab/models", "lab/tuning", "src/tuner"]
NOUNS = (
    "tokens ranks experts rows points models configurations files layers steps cases timings events slots elements "
    "processes passes hosts tensors coefficients histograms slices threads repetitions GPUs SMs groups entries"
).split()
# A number and a noun that has only one form there: "{} ranks" of one rank is "1 ranks".
COUNT = re.compile(r"(\{[^{}\"]*\})(?: [a-z]+)? (%s)\b" % "|".join(NOUNS))
# Numbers that are never 1, and verbs that look like nouns.
ALLOWED = [
    "between ranks",
    "takes points that are judged by",
    "configurations stand for the kernel's own rule",  # above 1
    "takes {} tokens and {} slots",  # of the kernel for few tokens: constants
]


def literals(path):
    """A file's lines, those of one text joined."""
    text = re.sub(r'"\s*\n\s*"', "", path.read_text())
    return [line.strip() for line in text.split("\n") if '"' in line]


# In the package: numbers that are never 1.
ALLOWED_IN_PYTHON = ["tokens {wrong:", "{len(sensible)} tokens", "{ranks} ranks exchange", "{} moves experts", "dimensions, ", "it needs {ndim} dimensions"]


def test_a_count_of_one_is_singular_in_the_package():
    package = pathlib.Path(switchyard.__file__).parent
    pattern = re.compile(r"(\{[^{}]*\})(?: [a-z]+)? (%s|bytes|dimensions)\b" % "|".join(NOUNS))
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(package.glob("*.py"))
        for line in path.read_text().split("\n")
        if ('f"' in line or "{}" in line) and "{" in line and pattern.search(line.replace(":,}", "}"))
        if not any(text in line for text in ALLOWED_IN_PYTHON) and ":,} bytes" not in line
    ]
    assert not found, "use count_text() of _values:\n" + "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_a_count_of_one_is_singular(room):
    if not (ROOT / "src").is_dir():
        pytest.skip("no sources")
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".cpp", ".h")
        for line in literals(path)
        if COUNT.search(line) and not any(text in line for text in ALLOWED)
    ]
    assert not found, "use plural() of base/plural.h:\n" + "\n".join(found)
