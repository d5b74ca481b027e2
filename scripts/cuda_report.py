#!/usr/bin/env python3
"""What the compiled kernels use: registers, shared memory, size, compile time.

    scripts/cuda_report.py [--cuobjdump PATH] [--times FILE]... [--require INSTRUCTION]... LIBRARY

Fails (exit code 1) if any kernel has a stack frame, or an instruction that loads from or stores to
local memory: the kernels are written to keep everything in registers and shared memory, and a spill
in an inner loop costs more than anything else on this page. Fails, too, if no kernel has an
instruction that is required, by its full name. `cmake --build build --target cuda_report` runs it on
what was built.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys

INSTRUCTION_BYTES = 16  # of every architecture since Volta


def run(command):
    # cuobjdump looks for nvdisasm on the path.
    path = os.pathsep.join([os.path.dirname(command[0]), os.environ.get("PATH", "")])
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True,
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


def code(cuobjdump, library):
    """{kernel: (bytes, [instructions on local memory], {names of instructions})}"""
    kernels = {}
    name = None
    for line in run([cuobjdump, "--dump-sass", library]).splitlines():
        if match := re.match(r"\s*Function : (\S+)", line):
            name = match[1]
            kernels[name] = (0, [], set())
        elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            _, local, names = kernels[name]
            kernels[name] = (int(match[1], 16) + INSTRUCTION_BYTES, local, names)
            names.add(re.sub(r"^@!?U?P\w+\s+", "", match[2]).split()[0])
            if re.search(r"\b(LDL|STL)\b", match[2]):
                local.append(f"{match[1]}: {match[2].strip()}")
    return kernels


def demangled(names):
    if not names or not shutil.which("c++filt"):
        return dict(zip(names, names))
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout
    return dict(zip(names, text.splitlines()))


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
    arguments = parser.parse_args()

    used = resources(arguments.cuobjdump, arguments.library)
    compiled = code(arguments.cuobjdump, arguments.library)
    if set(used) != set(compiled):
        sys.exit(f"cuda_report: cuobjdump lists other kernels with --dump-sass than with "
                 f"--dump-resource-usage: {sorted(set(used) ^ set(compiled))}")
    if not used:
        sys.exit(f"cuda_report: there are no kernels in {arguments.library}")
    names = demangled(sorted(used))
    print(f"{'registers':>9} {'stack':>6} {'local':>6} {'shared':>7} {'SASS':>10}  kernel")
    failures = []
    for name in sorted(used):
        usage = used[name]
        size, local, _ = compiled[name]
        print(f"{usage['REG']:>9} {usage['STACK']:>6} {usage['LOCAL']:>6} {usage['SHARED']:>7} "
              f"{size / 1024:>6.1f} KiB  {names[name]}")
        if usage["STACK"] or usage["LOCAL"]:
            failures.append(f"{names[name]}: stack frame of {usage['STACK']} bytes, "
                            f"{usage['LOCAL']} bytes of local memory")
        if local:
            failures.append(f"{names[name]}: {len(local)} accesses to local memory, the first at "
                            f"{local[0]}")
    print(f"{len(used)} kernels, {sum(size for size, _, _ in compiled.values()) / 1024:.1f} KiB of SASS; "
          f"{os.path.basename(arguments.library)} is "
          f"{os.path.getsize(arguments.library) / 2**20:.1f} MiB")
    for path in arguments.times:
        print_times(path)
    for instruction in arguments.require:
        having = [names[name] for name, (_, _, found) in sorted(compiled.items()) if instruction in found]
        print(f"{instruction}: in {', '.join(having) or 'no kernel'}")
        if not having:
            failures.append(f"no kernel has {instruction}")
    for failure in failures:
        print(f"cuda_report: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
