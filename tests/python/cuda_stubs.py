#!/usr/bin/env python3
"""Lets PyTorch's CUDA wheel from PyPI run on a machine that has no GPU, without 3 GB of CUDA libraries.

PyPI has no CPU-only build of PyTorch for Linux. Its libraries name those of CUDA as needed, so that they
must be there to be loaded, although nothing in them is called without a GPU. This makes a small library
in the place of each, which has the symbols that PyTorch refers to. Those of the runtime and the driver
say that there is no device; another that is called all the same says its name and aborts.

    cuda_stubs.py DIRECTORY_OF_TORCH     (site-packages/torch)

Needs a C compiler, nm and readelf. Never run it where a GPU is to be used.
"""

import pathlib
import re
import subprocess
import sys

# Real ones stay in use: libraries of the system, and of PyTorch's own wheel.
STUBBED = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt|cupti)[A-Za-z_]*\.so\.[0-9]+$")
# Functions of the runtime and the driver: cudaMalloc, cuMemCreate, but not cublasCreate.
RUNTIME = re.compile(r"cu(da)?[A-Z]")
CUDA_ERROR_NO_DEVICE = 100


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main():
    library = pathlib.Path(sys.argv[1]) / "lib"
    objects = sorted(library.glob("*.so*"))
    needed, wanted, defined = set(), {}, set()
    for path in objects:
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", path)):
            if STUBBED.match(name):
                needed.add(name)
        for line in output("nm", "-D", path).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if kind == "U" and re.match(r"lib[A-Za-z]+\.so\.[0-9]+$", version):
                wanted.setdefault(version, set()).add(name)  # as libcudart.so.13 names its versions
            elif kind == "U":
                wanted.setdefault("", set()).add(name)
            elif kind in "TDBRVW":
                defined.add(name)
    cuda = re.compile(r"(__?)?(cu|nccl|nvrtc|nvshmem|nvJitLink|nvtx)")
    anywhere = {name for name in wanted.pop("", set()) if cuda.match(name)} - defined
    for name in sorted(needed):
        build(library / name, name, wanted.get(name, set()), anywhere)
        anywhere = set()  # once is enough
    print(f"{len(needed)} libraries of CUDA stubbed in {library}")


def build(path, soname, versioned, plain):
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    for name in sorted(versioned | plain):
        if name == "__cudaRegisterFatBinary":
            lines.append(f"static void* handle[8]; void* {name}(void) {{ return handle; }}")
        elif name.startswith("__cuda"):  # what a library registers when it is loaded
            lines.append(f"long {name}(void) {{ return 0; }}")
        elif name == "cudaGetErrorString" or name == "cudaGetErrorName":
            lines.append(f'const char* {name}(void) {{ return "no device: a stub"; }}')
        elif RUNTIME.match(name):
            lines.append(f"long {name}(void) {{ return {CUDA_ERROR_NO_DEVICE}; }}")
        else:
            lines.append(f'void {name}(void) {{ fputs("{name} of {soname} is a stub\\n", stderr); abort(); }}')
    source, versions = path.with_suffix(".c"), path.with_suffix(".map")
    source.write_text("\n".join(lines) + "\n")
    command = ["cc", "-w", "-shared", "-fPIC", "-O0", f"-Wl,-soname,{soname}", str(source), "-o", str(path)]
    if versioned:
        versions.write_text(f"{soname} {{ global: {' '.join(n + ';' for n in sorted(versioned))} }};\n")
        command.append(f"-Wl,--version-script={versions}")
    subprocess.run(command, check=True)
    source.unlink()
    versions.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
