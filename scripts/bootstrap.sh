#!/usr/bin/env bash
# Installs the Debian packages named on the command line that are missing, or says how to. With cuda,
# also fetches what the GPU engine is built with beside the CUDA toolkit: the CUTLASS headers.
#   scripts/bootstrap.sh build|test|lint|cuda...
set -euo pipefail
cd "$(dirname "$0")/.."

# From PyPI, unpacked where CMake looks: the CUTLASS headers (the wheel of NVIDIA's kernel generator has
# them; nothing of it runs), and the disassembler that some toolkits leave out.
cutlass_version=4.2.0.0
cutlass_sha256=f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6
cutlass_directory=.cache/cutlass/$cutlass_version
cuobjdump_version=13.2.51
cuobjdump_sha256=95c69d3ddf0c2c1f535ec44c3433a66aeee19f588d9d22f73356e20b25f12b50
cuobjdump_directory=.cache/cuobjdump/$cuobjdump_version
nvdisasm_sha256=5a7acf77c55d6d2911ed6155d4d5bc156ffadf9df7a68a89b0c1155f4b13688c
nvdisasm_directory=.cache/nvdisasm/$cuobjdump_version

# fetch_wheel NAME VERSION SHA256 DIRECTORY
fetch_wheel() {
  local python=${PYTHON:-python3} work
  [ ! -d "$4" ] || return 0
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    echo "Fetching $1 needs Python with pip (apt-get install python3-pip)." >&2
    return 1
  fi
  echo "Fetching $1 $2 ..." >&2
  mkdir -p "$(dirname "$4")"
  work=$(mktemp -d "$4.XXXXXX")
  # pip refuses a file with another hash. The directory gets its name when it is complete.
  echo "$1==$2 --hash=sha256:$3" >"$work/requirements.txt"
  if "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
      --only-binary :all: -r "$work/requirements.txt" -d "$work" >&2 &&
    "$python" -m zipfile -e "$work"/*.whl "$work/unpacked" && mv "$work/unpacked" "$4"; then
    rm -rf "$work"
  else
    rm -rf "$work"
    return 1
  fi
}
fetch_cutlass() { fetch_wheel nvidia-cutlass $cutlass_version $cutlass_sha256 $cutlass_directory; }
# cuobjdump runs nvdisasm, which scripts/cuda_report.py puts on its path.
fetch_cuobjdump() {
  local bin=nvidia/cu13/bin
  ! command -v cuobjdump >/dev/null || return 0
  fetch_wheel nvidia-cuda-cuobjdump $cuobjdump_version $cuobjdump_sha256 $cuobjdump_directory &&
    fetch_wheel nvidia-cuda-nvdisasm $cuobjdump_version $nvdisasm_sha256 $nvdisasm_directory &&
    cp $nvdisasm_directory/$bin/nvdisasm $cuobjdump_directory/$bin/ &&
    chmod +x $cuobjdump_directory/$bin/cuobjdump $cuobjdump_directory/$bin/nvdisasm
}

# Debian's oneDNN wants OpenCL's headers when CMake looks for it, but does not depend on them.
build=(g++ cmake ninja-build libdnnl-dev ocl-icd-opencl-dev nlohmann-json3-dev libfmt-dev libcli11-dev
  libeigen3-dev libfabric-dev libssl-dev pkg-config)
test=(libgtest-dev libgmock-dev libbenchmark-dev clang libclang-rt-14-dev python3)
lint=(clang-format-14 clang-tidy-14)

wanted=()
cuda=no
for group in "$@"; do
  case $group in
    build) wanted+=("${build[@]}") ;;
    test) wanted+=("${test[@]}") ;;
    lint) wanted+=("${lint[@]}") ;;
    cuda) cuda=yes ;;
    *) echo "bootstrap: unknown group '$group'; use build, test, lint or cuda" >&2; exit 2 ;;
  esac
done

if [ $cuda = yes ] && ! fetch_cutlass; then
  echo "The CUTLASS headers could not be fetched. Unpack nvidia-cutlass $cutlass_version from PyPI into" >&2
  echo "$PWD/$cutlass_directory, or configure with" >&2
  echo "-DSWITCHYARD_CUTLASS_INCLUDE=<directory with cute/ and cutlass/>." >&2
  exit 1
fi
# Only reports need it.
if [ $cuda = yes ]; then fetch_cuobjdump || true; fi
[ ${#wanted[@]} -gt 0 ] || exit 0
if ! command -v dpkg-query >/dev/null; then
  echo "This is not a Debian-like system, so nothing was installed. Switchyard needs: a C++20" >&2
  echo "compiler, CMake 3.24+, Ninja, oneDNN 2.6+ or 3 (with OpenCL's headers if it was built with" >&2
  echo "OpenCL), nlohmann-json 3.11, fmt 9, CLI11 2.1, Eigen 3.3, for several hosts libfabric 1.11 and OpenSSL 3, and for the tests GoogleTest 1.12 and" >&2
  echo "Google Benchmark 1.7. With these installed, run:" >&2
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
