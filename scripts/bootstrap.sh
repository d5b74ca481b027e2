#!/usr/bin/env bash
# Installs the Debian packages named on the command line that are missing, or says how to.
# With cuda, or with build where nvcc is present, also fetches the CUTLASS headers.
#   scripts/bootstrap.sh build|test|lint|cuda...
set -euo pipefail
cd "$(dirname "$0")/.."

# Headers only: the wheel of NVIDIA's kernel generator has them. cmake/cutlass.cmake looks here.
cutlass_version=4.2.0.0
cutlass_sha256=f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6
cutlass_directory=.cache/cutlass/$cutlass_version

fetch_cutlass() {
  local python=${PYTHON:-python3} work
  [ ! -e "$cutlass_directory/cutlass_library/source/include/cutlass/version.h" ] || return 0
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    echo "Fetching the CUTLASS headers needs Python with pip (apt-get install python3-pip)." >&2
    return 1
  fi
  echo "Fetching the headers of CUTLASS $cutlass_version ..." >&2
  mkdir -p .cache/cutlass
  work=$(mktemp -d .cache/cutlass/XXXXXX)
  # pip refuses a file with another hash. The directory gets its name when it is complete.
  echo "nvidia-cutlass==$cutlass_version --hash=sha256:$cutlass_sha256" >"$work/requirements.txt"
  if "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
      --only-binary :all: -r "$work/requirements.txt" -d "$work" >&2 &&
    "$python" -m zipfile -e "$work"/nvidia_cutlass-*.whl "$work/unpacked"; then
    rm -rf "$cutlass_directory"
    mv "$work/unpacked" "$cutlass_directory"
    rm -rf "$work"
  else
    rm -rf "$work"
    return 1
  fi
}

build=(g++ cmake ninja-build libdnnl-dev nlohmann-json3-dev libfmt-dev libcli11-dev)
test=(libgtest-dev libgmock-dev libbenchmark-dev clang libclang-rt-14-dev python3)
lint=(clang-format-14 clang-tidy-14)

wanted=()
cuda=no
[ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null || cuda=present
for group in "$@"; do
  case $group in
    build) wanted+=("${build[@]}") ;;
    test) wanted+=("${test[@]}") ;;
    lint) wanted+=("${lint[@]}") ;;
    cuda) cuda=asked ;;
    *) echo "bootstrap: unknown group '$group'; use build, test, lint or cuda" >&2; exit 2 ;;
  esac
done

if [ $cuda != no ] && ! fetch_cutlass; then
  echo "The CUTLASS headers could not be fetched. Unpack nvidia-cutlass $cutlass_version from PyPI into" >&2
  echo "$PWD/$cutlass_directory, or configure with" >&2
  echo "-DSWITCHYARD_CUTLASS_INCLUDE=<directory with cute/ and cutlass/>; otherwise the build has no" >&2
  echo "GPU engine." >&2
  [ $cuda = present ] || exit 1
fi
[ ${#wanted[@]} -gt 0 ] || exit 0
if ! command -v dpkg-query >/dev/null; then
  echo "This is not a Debian-like system, so nothing was installed. Switchyard needs: a C++20" >&2
  echo "compiler, CMake 3.24+, Ninja, oneDNN 2.6+ or 3, nlohmann-json 3.11, fmt 9, CLI11 2.1, and" >&2
  echo "for the tests GoogleTest 1.12 and Google Benchmark 1.7. With these installed, run:" >&2
  echo "  cmake -S . -B build -G Ninja && cmake --build build && ctest --test-dir build" >&2
  exit 1
fi
missing=()
for package in "${wanted[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
    missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ]; then
  echo "These packages are missing, and installing them needs root:" >&2
  echo "  sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "Installing ${missing[*]} ..." >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
