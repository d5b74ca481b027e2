#!/usr/bin/env python3
"""Writes what a wheel is made of, as CycloneDX: the libraries that auditwheel found, and the headers that are compiled in.

    scripts/sbom.py WHEEL OUTPUT

The versions of headers are those of this machine's packages, so run it where the wheel was built.

Exit codes: 0 done; 2 a wheel that scripts/wheel.sh did not make, or a header package without a version here.
"""

import json
import pathlib
import re
import subprocess
import sys
import zipfile

from generated import ROOT

HEADERS = ["nlohmann-json3-dev", "libcli11-dev", "libeigen3-dev"]


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


def bill_of(wheel):
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            told = next(name for name in names if name.endswith("/sboms/auditwheel.cdx.json"))
            library = next(name for name in names if name.endswith("/libswitchyard_c.so"))
            bill = json.loads(archive.read(told))
            has_kernels = b".nv_fatbin" in archive.read(library)
    except (OSError, zipfile.BadZipFile, StopIteration) as problem:
        unusable(f"{wheel} is no wheel of scripts/wheel.sh ({problem!r}); make one by it")
    compiled_in = [debian_component(package) for package in HEADERS]
    if has_kernels:
        compiled_in.append(cutlass_component())
    bill["components"] += compiled_in
    bill["dependencies"][0]["dependsOn"] += [component["bom-ref"] for component in compiled_in]
    bill["dependencies"] += [{"ref": component["bom-ref"]} for component in compiled_in]
    return bill


def main():
    if len(sys.argv) != 3:
        unusable(f"give a wheel and an output file, not {len(sys.argv) - 1} arguments")
    bill = bill_of(pathlib.Path(sys.argv[1]))
    pathlib.Path(sys.argv[2]).write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{sys.argv[2]}: {len(bill['components'])} components")


if __name__ == "__main__":
    main()
