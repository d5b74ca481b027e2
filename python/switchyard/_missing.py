"""Why the library cannot be loaded, and what to do about it."""

from __future__ import annotations

import os
import re

# Debian's packages by the names of libraries; {} is the number in a library's name, which differs between
# releases: libdnnl.so.2 is libdnnl2 in Debian 12.
_PACKAGES = {
    "libdnnl": "libdnnl{}", "libfmt": "libfmt{}", "libfabric": "libfabric{}",
    "libcrypto": "libssl{}", "libssl": "libssl{}", "libgomp": "libgomp{}",
    "libOpenCL": "ocl-icd-libopencl{}", "libstdc++": "libstdc++{}", "libgcc_s": "libgcc-s{}",
    "libnuma": "libnuma{}", "libz": "zlib{}g",
}


def package_of(library: str) -> str | None:
    """The Debian package of a library, such as "libfmt.so.9"; None if it is not known."""
    stem, _, number = library.partition(".so")
    package = _PACKAGES.get(stem)
    return None if package is None or not number else package.format(number.removeprefix("."))


def _remedy_of_missing(library: str) -> str:
    stem = library.partition(".so")[0]
    if stem in ("libcuda", "libnvidia-ml"):
        return f"{library} is part of NVIDIA's driver: install the driver of this machine's GPU"
    package = package_of(library)
    if package is None:
        return f"find the package that has it, on Debian with: apt-file search {library}"
    return (
        f"it is in Debian's package {package}: sudo apt-get install {package} (on another distribution, or where no "
        f"package has that number: install what has {library}, or build the package here with pip install .)"
    )


def explain(path: str, error: str) -> str:
    """The text of an ImportError, of what dlopen() said about the library at `path`."""
    start = f"switchyard's library {path} cannot be loaded: {error}. "
    if os.environ.get("SWITCHYARD_LIBRARY"):
        again = "Build what SWITCHYARD_LIBRARY names anew, or unset it"
    else:
        again = "Install the package for this platform (Linux, x86-64 or AArch64), or build it with: pip install ."
    missing = re.match(r"(\S+): cannot open shared object file", error)
    if missing and missing[1] != path and os.path.exists(path):
        return start + f"The library needs {missing[1]}, which is not installed: {_remedy_of_missing(missing[1])}"
    if "version `GLIBC" in error or "version `CXXABI" in error:
        return start + f"It was built on a newer system than this. {again}"
    if "undefined symbol" in error or "version `" in error:
        return start + f"A library that it uses is of another version than the one it was built with. {again}"
    return start + again
