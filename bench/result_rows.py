"""Files of results that scripts beside `switchyard bench` write."""

import json
import pathlib
import re
import shutil
import subprocess


def percentile(values, share):
    """Nearest rank, as in rows of the command."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def commit_here():
    """This tree's, for rows. "unknown" where there is no git, or no repository."""
    if not shutil.which("git"):
        return "unknown"
    words = ["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def card_of(machine):
    """The device's name: "NVIDIA H200" of "2 x NVIDIA H200, 132 SMs, CUDA 13.0"."""
    return re.sub(r"^\d+ x ", "", machine).split(",")[0]


def merge(path, rows, key):
    """Replaces the rows of the same card that agree in the fields of `key`, a row per line, as `switchyard bench
    --json` does."""
    key_of = lambda row: (card_of(row.get("machine", "")), *(row[name] for name in key))
    kept = {key_of(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    kept.update({key_of(row): row for row in rows})
    write(path, kept.values())


def write(path, rows):
    partial = path.with_suffix(".partial")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)
