#!/usr/bin/env python3
"""What the compiled kernels use: registers, shared memory, size, compile time.

    scripts/cuda_report.py [--cuobjdump PATH] [--times FILE]... [--require INSTRUCTION]...
                           [--sizes FILE --compiler VERSION [--record]] LIBRARY

Fails (exit code 1) if any kernel has a stack frame or local memory: the kernels are written to keep
everything in registers and shared memory, and a spill in an inner loop costs more than anything else
on this page. Fails, too, if no kernel has an instruction that is required, by its full name; only then
code is disassembled, which takes most of a minute. `cmake --build build --target cuda_report` runs it
on what was built.

FILE has the size of each kernel's code as one version of nvcc makes it. The report fails if a kernel has
grown by more than a hundredth and 512 bytes: a branch in a loop that is unrolled over all sums cost 2 % of a pass once,
and went unseen. If the growth is meant, --record writes the sizes of this build instead.
"""

import argparse
import csv
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

MOST_GROWTH = 1.01, 512  # of a kernel's code: by so much, and so many bytes


def run(command, directory=None):
    # cuobjdump looks for nvdisasm on the path.
    path = os.pathsep.join([os.path.dirname(command[0]), os.environ.get("PATH", "")])
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=directory,
                              env={**os.environ, "PATH": path}).stdout
    except FileNotFoundError:
        sys.exit(f"cuda_report: {command[0]} was not found; it comes with the CUDA toolkit "
                 "(cuda-cuobjdump), name it with --cuobjdump")
    except subprocess.CalledProcessError as error:
        sys.exit(f"cuda_report: {' '.join(command)} failed: {error.stderr.strip()}")


def resources(cuobjdump, library):
    """{kernel: {"REG": .., "STACK": .., "SHARED": .., "LOCAL": ..}}"""
    kernels = {}
    name = None
    for line in run([cuobjdump, "--dump-resource-usage", library]).splitlines():
        if match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif name and "REG:" in line:
            kernels[name] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            name = None
    return kernels


def sections(image):
    """[(name, bytes)] of an ELF file of 64 bits."""
    table, = struct.unpack_from("<Q", image, 40)
    entry, count, of_names = struct.unpack_from("<3H", image, 58)
    heads = [struct.unpack_from("<IIQQQQ", image, table + i * entry) for i in range(count)]
    names = heads[of_names][4]
    return [(image[names + head[0]:image.index(b"\0", names + head[0])].decode(), head[5]) for head in heads]


def sizes(cuobjdump, library):
    """{kernel: bytes of its code}"""
    with tempfile.TemporaryDirectory() as directory:
        run([cuobjdump, "--extract-elf", "all", os.path.abspath(library)], directory)
        images = [open(os.path.join(directory, name), "rb").read() for name in os.listdir(directory)]
    return {name[len(".text."):]: size for image in images for name, size in sections(image) if name.startswith(".text.")}


def instructions(cuobjdump, library):
    """{kernel: {names of instructions}}"""
    kernels = {}
    name = None
    for line in run([cuobjdump, "--dump-sass", library]).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            name = match[1]
            kernels[name] = set()
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            kernels[name].add(re.sub(r"^@!?U?P\w+\s+", "", match[1]).split()[0])
    return kernels


def demangled(names):
    if not names or not shutil.which("c++filt"):
        return dict(zip(names, names))
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout
    return dict(zip(names, text.splitlines()))


def short(name):
    """`layer_kernel<FP8Policy, true, true>` of a demangled name: without namespaces, result and parameters"""
    name = name.replace("(anonymous namespace)::", "").replace("switchyard::gpu::", "").removeprefix("void ")
    depth = 0
    for i, c in enumerate(name):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if c == "(" and depth == 0:
            return name[:i]
    return name


def grew(before, size):
    factor, more = MOST_GROWTH
    return size > factor * before + more


def growth(path, compiler, compiled):
    """Failures of kernels that are larger than FILE says, or that it does not know. `compiled`: {name: bytes}"""
    with open(path) as file:
        recorded = json.load(file)
    if recorded["nvcc"] != compiler:
        print(f"sizes are recorded for nvcc {recorded['nvcc']}, this is {compiler}: not compared")
        return []
    remedy = "; make it smaller, or run cuda_report.py with --record and say why in the commit"
    failures = []
    for name, size in compiled.items():
        before = recorded["bytes"].get(name)
        if before is None:
            failures.append(f"{name}: no size is recorded for it{remedy}")
        elif grew(before, size):
            failures.append(f"{name}: {size} bytes of code, {100 * (size / before - 1):.1f} % more than recorded{remedy}")
        elif grew(size, before):
            print(f"{name}: {size} bytes of code, {100 * (1 - size / before):.1f} % fewer than recorded; record it")
    return failures


def record(path, compiler, compiled):
    with open(path, "w") as file:
        json.dump({"nvcc": compiler, "bytes": dict(sorted(compiled.items()))}, file, indent=1)
        file.write("\n")


def print_times(path):
    """Of the last compilation: nvcc appends to the file, and ends each with a row of its own."""
    if not os.path.exists(path):
        return
    with open(path, newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    last = []
    for row in rows:
        if len(row) < 7 or row[-1] != "ms":
            continue
        if last and last[-1][1].startswith("nvcc (driver)"):
            last = []
        last.append(row)
    if not last:
        return
    seconds = {}
    for row in last:
        phase = row[1].split(" ")[0] or "other"
        seconds[phase] = seconds.get(phase, 0) + float(row[-2]) / 1000
    phases = ", ".join(f"{name} {time:.1f} s" for name, time in sorted(
        seconds.items(), key=lambda item: -item[1]) if time >= 0.05)
    print(f"compile time of {os.path.basename(last[0][0])}: {sum(seconds.values()):.1f} s ({phases})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--times", action="append", default=[],
                        help="what nvcc --time wrote, once per file")
    parser.add_argument("--require", action="append", default=[], metavar="INSTRUCTION")
    parser.add_argument("--sizes", metavar="FILE", help="the sizes of kernels that were recorded")
    parser.add_argument("--compiler", metavar="VERSION", help="nvcc's version, with --sizes")
    parser.add_argument("--record", action="store_true", help="write FILE instead of comparing with it")
    arguments = parser.parse_args()
    if arguments.sizes and not arguments.compiler:
        parser.error("--sizes needs --compiler: another nvcc makes other code")
    if arguments.record and not arguments.sizes:
        parser.error("--record needs --sizes")

    used = resources(arguments.cuobjdump, arguments.library)
    if not used:
        sys.exit(f"cuda_report: there are no kernels in {arguments.library}")
    compiled = sizes(arguments.cuobjdump, arguments.library)
    if set(used) != set(compiled):
        sys.exit(f"cuda_report: cuobjdump extracts other kernels than it lists: {sorted(set(used) ^ set(compiled))}")
    names = demangled(sorted(used))
    print(f"{'registers':>9} {'stack':>6} {'local':>6} {'shared':>7} {'SASS':>10}  kernel")
    failures = []
    for name in sorted(used):
        usage = used[name]
        print(f"{usage['REG']:>9} {usage['STACK']:>6} {usage['LOCAL']:>6} {usage['SHARED']:>7} "
              f"{compiled[name] / 1024:>6.1f} KiB  {names[name]}")
        if usage["STACK"] or usage["LOCAL"]:
            failures.append(f"{names[name]}: stack frame of {usage['STACK']} bytes, "
                            f"{usage['LOCAL']} bytes of local memory")
    print(f"{len(used)} kernels, {sum(compiled.values()) / 1024:.1f} KiB of SASS; "
          f"{os.path.basename(arguments.library)} is "
          f"{os.path.getsize(arguments.library) / 2**20:.1f} MiB")
    for path in arguments.times:
        print_times(path)
    found = instructions(arguments.cuobjdump, arguments.library) if arguments.require else {}
    for instruction in arguments.require:
        having = [names[name] for name in sorted(found) if instruction in found[name]]
        print(f"{instruction}: in {', '.join(having) or 'no kernel'}")
        if not having:
            failures.append(f"no kernel has {instruction}")
    if arguments.sizes:
        by_name = {short(names[name]): size for name, size in compiled.items()}
        if len(by_name) != len(compiled):
            sys.exit("cuda_report: two kernels have the same short name")
        if arguments.record:
            record(arguments.sizes, arguments.compiler, by_name)
        else:
            failures += growth(arguments.sizes, arguments.compiler, by_name)
    for failure in failures:
        print(f"cuda_report: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
