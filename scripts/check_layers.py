#!/usr/bin/env python3
"""Fails where a file of src/ includes one of a higher room, or of a room it must not know.

A room may include itself and the rooms that stand before it here. Public headers (switchyard/) are
open to all.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# From the lowest to the highest.
ROOMS = ["base", "protocol", "model", "routing", "reference", "fabric", "trace", "layer", "cpu", "gpu",
         "report", "cli"]
# Rooms that stand side by side, although one comes first above.
STRANGERS = {
    ("gpu", "cpu"): "the engines do not know each other",
    ("report", "gpu"): "a report is made of files",
    ("report", "cpu"): "a report is made of files",
    ("routing", "model"): "routing knows a layer's spec, not where it came from",
    ("reference", "routing"): "the reference shares no code with what it judges",
    ("reference", "protocol"): "the reference shares no code with what it judges",
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_]+)/', re.MULTILINE)


def faults(source: pathlib.Path):
    for path in sorted(source.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        room = path.relative_to(source).parts[0]
        name = path.relative_to(source.parent)
        if room not in ROOMS:
            yield f"{name}: room '{room}' is not in ROOMS of {pathlib.Path(__file__).name}"
            continue
        for other in sorted(set(INCLUDE.findall(path.read_text()))):
            if other in ("switchyard", room):
                continue
            if other not in ROOMS:
                yield f"{name}: includes \"{other}/...\", which is no room"
            elif ROOMS.index(other) > ROOMS.index(room):
                yield f"{name}: '{room}' includes the higher room '{other}'"
            elif (room, other) in STRANGERS:
                yield f"{name}: '{room}' includes '{other}': {STRANGERS[room, other]}"


def main() -> int:
    found = list(faults(ROOT / "src"))
    print("\n".join(found) if found else f"layers: {len(ROOMS)} rooms, no include points upward")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
