#!/usr/bin/env python3
"""Checks the documents: exit 1, with a line for each fault, if one is found.

- Relative links, and their #anchors, lead somewhere; so do paths of this tree in `backticks` (outside
  docs/lab, whose pages tell of code as it was).
- No command of a page writes into results/, whose rows are committed.
- docs/... as cited in code exists, decisions also by number alone (docs/decisions/0007).
- README.md has at most 200 lines, a decision at most 60; every decision has a status and a row in the index,
  every laboratory page is linked from docs/lab/README.md.
- Exactly HEADLESS comments begin without a subject ("Of ...", "Who ..."); the number may only fall.
- Generated parts are what scripts/tables.py and scripts/charts.py make.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DECISIONS = ROOT / "docs" / "decisions"
LAB = ROOT / "docs" / "lab"
README_LINES, DECISION_LINES = 200, 60
# Lower this when comments are rewritten; never raise it. Every room with product or measuring code counts, so
# that moving a file does not change the number.
HEADLESS = 2
HEADLESS_ROOMS = ["src", "include", "lab", "python", "bench", "examples", "fuzz",
                  *sorted(f"tests/{room.name}" for room in (ROOT / "tests").iterdir() if room.name != "python")]
HEADLESS_COMMENT = re.compile(r"(//|#)\s+(Of|Those|Who|Whoever|What|That) [a-z]+ ")
CODE = ["src", "include", "lab", "tests", "bench", "examples", "fuzz", "scripts", "cmake", "packaging", "run", "test", "CMakeLists.txt"]
CODE_SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt", ""}
TREE = r"(?:src|include|lab|tests|bench|examples|fuzz|scripts|cmake|packaging|docs|results)/"

faults = []


def fault(path, text):
    faults.append(f"{path.relative_to(ROOT)}: {text}")


def documents():
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text):
    """Without code blocks, where brackets mean other things."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(path):
    """What GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path.read_text()), re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


def check_links(path):
    text = prose(path.read_text())
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path
        if not to.exists():
            fault(path, f"link to {target}: there is no such file")
        elif anchor and to.suffix == ".md" and anchor not in anchors(to):
            fault(path, f"link to {target}: no heading makes that anchor")


def check_paths(path):
    for code in re.findall(r"`([^`\n]+)`", prose(path.read_text())):
        for name in re.findall(rf"(?<![\w./-]){TREE}[\w./*-]*", code):
            if "{" in code:
                continue
            # `src/gpu/heap` stands for the header and what belongs to it.
            name = name.rstrip(".")
            if not any(ROOT.glob(name.rstrip("/"))) and not any(ROOT.glob(name + ".*")):
                fault(path, f"`{name}`: there is no such file")


def check_commands(path):
    for line in path.read_text().splitlines():
        for option in re.findall(r"(--[\w-]+)[ =]results/\S+", line):
            if option not in ("--expect", "--published", "--evaluate", "--profile", "--from"):
                fault(path, f"{line.strip()}: {option} would write into results/; name a file of the working directory")


def check_citations():
    this = pathlib.Path(__file__).resolve()
    for place in CODE:
        top = ROOT / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if not path.is_file() or path.suffix not in CODE_SUFFIXES or path == this:
                continue
            for name in re.findall(r"(?<![\w/])docs/[\w./-]*\w", path.read_text(errors="replace")):
                if not (ROOT / name).exists() and not any(ROOT.glob(name + "-*.md")):
                    fault(path, f"cites {name}, which does not exist")


def check_sizes_and_indexes():
    lines = len((ROOT / "README.md").read_text().splitlines())
    if lines > README_LINES:
        fault(ROOT / "README.md", f"{lines} lines; at most {README_LINES} keep it readable")
    index = (DECISIONS / "README.md").read_text()
    for path in sorted(DECISIONS.glob("[0-9]*.md")):
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > DECISION_LINES:
            fault(path, f"{lines} lines; at most {DECISION_LINES}: measurements belong in docs/lab")
        if not re.search(r"^\*\*Status:\*\* \S", text, re.M):
            fault(path, 'no line "**Status:** ..."')
        if f"({path.name})" not in index:
            fault(path, "is not in docs/decisions/README.md")
    index = (LAB / "README.md").read_text()
    for path in sorted(LAB.glob("*.md")):
        if path.name != "README.md" and f"({path.name})" not in index:
            fault(path, "is not in docs/lab/README.md")


def check_headless_comments():
    found = []
    for room in HEADLESS_ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.is_file() and path.suffix in CODE_SUFFIXES:
                lines = path.read_text(errors="replace").splitlines()
                name = path.relative_to(ROOT)
                found += [f"{name}:{number}" for number, line in enumerate(lines, 1) if HEADLESS_COMMENT.search(line)]
    this = pathlib.Path(__file__).resolve()
    if len(found) > HEADLESS:
        fault(this, f"{len(found)} headless comments, at most {HEADLESS} are allowed; give the new ones a subject. "
                    f"All of them: {' '.join(found)}")
    elif len(found) < HEADLESS:
        fault(this, f"{len(found)} headless comments; lower the ceiling HEADLESS from {HEADLESS} to {len(found)}")


def check_generated():
    for script in ["tables.py", "charts.py"]:
        command = [sys.executable, ROOT / "scripts" / script, "--check"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            faults.append(f"scripts/{script} --check: {(result.stdout + result.stderr).strip()}")


def main():
    for path in documents():
        check_links(path)
        check_commands(path)
        if LAB not in path.parents:
            check_paths(path)
    check_citations()
    check_sizes_and_indexes()
    check_headless_comments()
    check_generated()
    for line in faults:
        print(line)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
