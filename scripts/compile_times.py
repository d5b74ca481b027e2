#!/usr/bin/env python3
"""Prints how many processor seconds each file takes to compile, in a build of its own.

    scripts/compile_times.py [TARGET] [CMAKE_ARGUMENT...]    TARGET: switchyard_cli, which ./run builds

Every file is compiled by this script, which notes its time and knows no cache. Unlike those of ./run,
files read all their headers: there are no precompiled ones.
"""

import os
import pathlib
import resource
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOG = "SWITCHYARD_COMPILE_TIMES"


def seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compile_one(command, log):
    """The compiler's command, and a line in the log: one write, so that others' do not get into it."""
    code = subprocess.run(command).returncode
    source = command[command.index("-c") + 1] if "-c" in command else "?"
    with open(log, "a") as file:
        file.write(f"{seconds_of_children():.2f} {source}\n")
    return code


def main():
    if LOG in os.environ:
        return compile_one(sys.argv[1:], os.environ[LOG])
    target = sys.argv[1] if len(sys.argv) > 1 else "switchyard_cli"
    with tempfile.TemporaryDirectory() as directory:
        build, log = pathlib.Path(directory, "build"), pathlib.Path(directory, "log")
        configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DSWITCHYARD_BUILD_TESTS=OFF",
                     "-DSWITCHYARD_BUILD_BENCH=OFF", "-DSWITCHYARD_CUDA=OFF",
                     f"-DCMAKE_CXX_COMPILER_LAUNCHER={sys.executable};{pathlib.Path(__file__).resolve()}"]
        subprocess.run([*configure, *sys.argv[2:]], check=True, stdout=subprocess.DEVNULL)
        environment = {**os.environ, LOG: str(log), "CCACHE_DISABLE": "1"}
        subprocess.run(["cmake", "--build", build, "--target", target], check=True, env=environment)
        files = sorted((line.split() for line in log.read_text().splitlines()), key=lambda x: -float(x[0]))
    for seconds, source in files:
        print(f"{float(seconds):7.2f}  {os.path.relpath(source, ROOT)}")
    print(f"{sum(float(seconds) for seconds, _ in files):7.2f}  all {len(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
