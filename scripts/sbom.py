#!/usr/bin/env python3
"""Writes what a wheel is made of, as CycloneDX: the libraries that it carries, and what is compiled or linked into its own.

    scripts/sbom.py WHEEL OUTPUT

The versions of Debian's packages are those of this machine's packages, so run it where the wheel was built.

Exit codes: 0 done; 2 a wheel that scripts/wheel.sh did not make, or a package without a version here.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

from generated import ROOT

# Headers, and static libraries.
COMPILED_IN = ["nlohmann-json3-dev", "libcli11-dev", "libeigen3-dev", "libfmt-dev", "libssl-dev"]


def unusable(text):
    print(f"sbom.py: {text}", file=sys.stderr)
    sys.exit(2)


def debian_component(package):
    found = subprocess.run(["dpkg-query", "-W", "-f=${Version}", package], capture_output=True, text=True, check=False)
    version = found.stdout.strip()
    if found.returncode != 0 or not version:
        unusable(f"{package} is not installed here; run scripts/bootstrap.sh build on the machine that built the wheel")
    purl = f"pkg:deb/debian/{package}@{version.replace('+', '%2B')}"
    return {"type": "library", "bom-ref": purl, "name": package, "version": version, "purl": purl}


def cutlass_component():
    version = re.search(r"^cutlass_version=(\S+)$", (ROOT / "scripts/bootstrap.sh").read_text(), re.M)[1]
    purl = f"pkg:pypi/nvidia-cutlass@{version}"
    return {"type": "library", "bom-ref": purl, "name": "nvidia-cutlass", "version": version, "purl": purl}


def cuda_component():
    """The CUDA runtime, which is linked statically."""
    told = subprocess.run([os.environ.get("CUDACXX", "nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"\bV([0-9.]+)", told)[1]
    purl = f"pkg:generic/cuda-cudart@{version}"
    return {"type": "library", "bom-ref": purl, "name": "cuda-cudart", "version": version, "purl": purl}


def bill_of(wheel):
    try:
        with zipfile.ZipFile(wheel) as archive:
            carried = json.loads(archive.read("switchyard/licenses/components.json"))
            has_kernels = b".nv_fatbin" in archive.read("switchyard/lib/libswitchyard_c.so")
    except (OSError, zipfile.BadZipFile, KeyError) as problem:
        unusable(f"{wheel} is no wheel of scripts/wheel.sh ({problem!r}); make one by it")
    gcc = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    components = carried + [debian_component(package) for package in [*COMPILED_IN, f"libstdc++-{gcc}-dev"]]
    if has_kernels:
        components += [cutlass_component(), cuda_component()]
    name, version = wheel.name.split("-")[:2]
    purl = f"pkg:pypi/{name.replace('_', '-')}@{version}?file_name={wheel.name}"
    references = [component["bom-ref"] for component in components]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.4",
        "version": 1,
        "metadata": {"component": {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}},
        "components": components,
        "dependencies": [{"ref": purl, "dependsOn": references}, *({"ref": reference} for reference in references)],
    }


def main():
    if len(sys.argv) != 3:
        unusable(f"give a wheel and an output file, not {len(sys.argv) - 1} arguments")
    bill = bill_of(pathlib.Path(sys.argv[1]))
    pathlib.Path(sys.argv[2]).write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{sys.argv[2]}: {len(bill['components'])} components")


if __name__ == "__main__":
    main()
