#!/usr/bin/env python3
"""Fails if an include in src/ points from a lower room to a higher one, and names the include.

A room is a folder of src/. ROOMS is the order, the lowest first: a file may include files of its own
room and of rooms before it. A folder that is not in the list is an error, too.
"""

import pathlib
import re
import sys

ROOMS = [
    "base",
    "trace",
    "model",
    "protocol",
    "fabric",
    "routing",
    "report",
    # The GPU's doors for other rooms (device.h, peer_link.h), then its kernels from the instruction
    # up. gpu/host is above layer: it implements the layer's engine.
    "gpu",
    "gpu/ptx",
    "gpu/pipeline",
    "gpu/tile",
    "gpu/route",
    "gpu/schedule",
    "gpu/exchange",
    "gpu/tokens",
    "gpu/layer",
    "layer",
    "cpu",
    "gpu/host",
    "reference",
    "cli",
]

# Arrows that are still to go: (file, included file). One that no longer exists is an error.
STILL_TO_GO = {
    ("model/quantize.h", "protocol/host_device.h"),
    ("model/weights.cpp", "protocol/partition.h"),
    ("protocol/agreement.h", "fabric/fabric.h"),
}

# The kernels' rooms see nothing of the host but these: what both engines share.
BELOW_KERNELS = {"base", "trace", "model", "protocol", "routing"}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".inc"}


def room_of(path: str) -> str:
    return path.rpartition("/")[0]


def is_kernel_room(room: str) -> bool:
    return room.startswith("gpu/") and room != "gpu/host"


def problems(source: pathlib.Path) -> list[str]:
    rank = {room: number for number, room in enumerate(ROOMS)}
    found, met = [], set()
    for file in sorted(p for p in source.rglob("*") if p.suffix in SUFFIXES):
        name = file.relative_to(source).as_posix()
        room = room_of(name)
        if room not in rank:
            found.append(f"src/{name}: the room '{room}' is not in ROOMS of {__file__}")
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None or not (source / match[1]).exists():
                continue  # of include/, or generated
            other = room_of(match[1])
            if (name, match[1]) in STILL_TO_GO:
                met.add((name, match[1]))
            elif other not in rank or rank[other] > rank[room]:
                found.append(f"src/{name}:{number}: {room} includes {match[1]}, of a higher room")
            elif is_kernel_room(room) and not is_kernel_room(other) and other not in BELOW_KERNELS:
                found.append(f"src/{name}:{number}: {room} includes {match[1]}, of the host")
    for name, other in sorted(STILL_TO_GO - met):
        found.append(f"src/{name} no longer includes {other}: take it out of STILL_TO_GO")
    return found


def main() -> int:
    source = pathlib.Path(__file__).resolve().parent.parent / "src"
    found = problems(source)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
