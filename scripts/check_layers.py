#!/usr/bin/env python3
"""Fails where a file of src/ or lab/ includes one of a higher room, or of a room it must not know.

A room may include itself and the rooms that stand before it here, so the library never includes what
measures it. Public headers (switchyard/) are open to all. Within src/gpu the same holds for the folders
of GPU_ROOMS. Libraries of SLOW_LIBRARIES are included by one file each.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The rooms of each tree, from the lowest to the highest.
TREES = {
    "src": ["base", "protocol", "model", "routing", "network", "fabric", "trace", "layer", "exchange",
            "symmetric", "cpu", "gpu", "operators", "tuner", "c_api"],
    "examples": ["all_to_all"],
    "lab": ["blackwell", "common", "models", "reference", "tuning", "results", "report", "machine", "run", "bench", "cli"],
}
ROOMS = [room for rooms in TREES.values() for room in rooms]
# Rooms that stand side by side, although one comes first above.
STRANGERS = {
    ("gpu", "cpu"): "the engines do not know each other",
    ("tuner", "cpu"): "a tuner knows kernels by their callbacks",
    ("tuner", "gpu"): "a tuner knows kernels by their callbacks",
    ("tuner", "operators"): "a tuner knows kernels by their callbacks",
    ("tuner", "layer"): "a tuner knows kernels by their callbacks",
    ("symmetric", "exchange"): "a heap knows its memory, not what is sent through it",
    ("exchange", "symmetric"): "an exchange has a heap of its own",
    ("c_api", "cpu"): "the layer chooses the engine",
    ("c_api", "gpu"): "the layer chooses the engine",
    ("results", "c_api"): "the C interface is for other programs",
    ("report", "c_api"): "the C interface is for other programs",
    ("machine", "c_api"): "the C interface is for other programs",
    ("run", "c_api"): "the C interface is for other programs",
    ("bench", "c_api"): "the C interface is for other programs",
    ("cli", "c_api"): "the C interface is for other programs",
    ("run", "operators"): "a run is of layers",
    ("results", "operators"): "results are files",
    ("report", "operators"): "a report is made of files",
    ("results", "gpu"): "results are files",
    ("results", "cpu"): "results are files",
    ("report", "gpu"): "a report is made of files",
    ("report", "cpu"): "a report is made of files",
    ("machine", "results"): "a machine's facts do not depend on what was measured on it",
    ("machine", "report"): "a machine's facts do not depend on what was measured on it",
    ("all_to_all", "cpu"): "it is written on the symmetric heap alone, as a user would",
    ("all_to_all", "exchange"): "it is written on the symmetric heap alone, as a user would",
    ("all_to_all", "protocol"): "it is written on the symmetric heap alone, as a user would",
    ("all_to_all", "layer"): "it is written on the symmetric heap alone, as a user would",
    ("run", "cpu"): "the layer chooses the engine",
    ("run", "results"): "a run is not yet a result",
    ("run", "report"): "a run is not yet a result",
    ("bench", "cpu"): "bench times layers; machine knows the engine's tiles",
    ("bench", "report"): "a report is made of files",
    ("routing", "model"): "routing knows a layer's spec, not where it came from",
    ("reference", "routing"): "the reference shares no code with what it judges",
    ("reference", "protocol"): "the reference shares no code with what it judges",
}
# Within src/gpu, the kernels from the instruction up, then the host. What lies in src/gpu itself are
# its doors for other rooms.
GPU_ROOMS = ["ptx", "pipeline", "tile", "grouped", "operators", "route", "schedule", "exchange", "tokens", "dispatch", "layer", "host"]
# Rooms outside src/gpu that kernels know: what both engines share.
KERNELS_KNOW = {"base", "protocol", "routing", "switchyard"}
# Each of their includes costs seconds of compile time: docs/dependencies.md.
SLOW_LIBRARIES = {"nlohmann": "src/base/json.cpp", "CLI": "lab/cli/arguments.cpp", "Eigen": "src/tuner/fit.cpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_]+)/', re.MULTILINE)


def sources(tree: pathlib.Path):
    return (path for path in sorted(tree.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh"))


def faults(tree: pathlib.Path):
    for path in sources(tree):
        room = path.relative_to(tree).parts[0]
        name = path.relative_to(ROOT)
        if room not in TREES[tree.name]:
            if tree.name != "examples":
                yield f"{name}: room '{room}' is not in TREES of {pathlib.Path(__file__).name}"
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


def gpu_faults(source: pathlib.Path):
    for path in sources(source / "gpu"):
        room, *rest = path.relative_to(source / "gpu").parts
        name = path.relative_to(source.parent)
        if not rest:
            continue  # a door
        if room not in GPU_ROOMS:
            yield f"{name}: room '{room}' is not in GPU_ROOMS of {pathlib.Path(__file__).name}"
            continue
        text = path.read_text()
        for include in sorted(set(re.findall(r'^\s*#\s*include\s+"([a-z_]+/[^"]+)"', text, re.MULTILINE))):
            top, *folders = include.split("/")[:-1]
            if top != "gpu":
                if room != "host" and top not in KERNELS_KNOW:
                    yield f"{name}: kernels do not know '{top}': {include}"
            elif not folders:
                if room != "host" and include != "gpu/kernel_list.inc":
                    yield f"{name}: kernels do not know the GPU's doors: {include}"
            elif folders[0] not in GPU_ROOMS:
                yield f"{name}: includes {include}, which is in no room"
            elif GPU_ROOMS.index(folders[0]) > GPU_ROOMS.index(room):
                yield f"{name}: 'gpu/{room}' includes {include}, of a higher room"


def library_faults(tree: pathlib.Path):
    for path in sources(tree):
        name = str(path.relative_to(ROOT))
        for library in re.findall(r"^\s*#\s*include\s+<([A-Za-z0-9_]+)/", path.read_text(), re.MULTILINE):
            if SLOW_LIBRARIES.get(library, name) != name:
                yield f"{name}: includes <{library}/...>, which only {SLOW_LIBRARIES[library]} does"


def main() -> int:
    found = [*gpu_faults(ROOT / "src")]
    for tree in TREES:
        found += [*faults(ROOT / tree), *library_faults(ROOT / tree)]
    print("\n".join(found) if found else f"layers: {len(ROOMS)} rooms, no include points upward")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
