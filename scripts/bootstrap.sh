#!/usr/bin/env bash
# Installs the missing packages of groups of cmake/packages.txt, or says how to. With cuda, also fetches
# what the GPU engine is built with beside the CUDA toolkit: the CUTLASS headers.
#   scripts/bootstrap.sh build|test|browser|site|lint|cuda...
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
  echo "Fetching $1 $2 ..." >&2
  mkdir -p "$(dirname "$4")"
  work=$(mktemp -d "$4.XXXXXX")
  # Debian's python3 has pip in virtual environments only.
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    if ! "$python" -m venv "$work/venv" >&2; then
      echo "Fetching $1 needs Python with venv or pip (apt-get install python3-venv)." >&2
      rm -rf "$work"
      return 1
    fi
    python=$work/venv/bin/python
  fi
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

# Lint and format of version 14, for releases that have others only (.ci/run has it on its path).
lint_version=14.0.6
lint_directory=.cache/lint-14

groups=()
cuda=no
for group in "$@"; do
  case $group in
    build|test|browser|site|lint) groups+=("$group") ;;
    cuda) cuda=yes ;;
    *) echo "bootstrap: unknown group '$group'; use build, test, browser, site, lint or cuda" >&2; exit 2 ;;
  esac
done

is_installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
has_candidate() { [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) == *"Candidate: "[!\(]* ]]; }

install_packages() {
  local group names name missing packages from_pypi
  if ! command -v dpkg-query >/dev/null; then
    echo "This is not a Debian-like system, so nothing was installed. Switchyard needs: a C++20 compiler," >&2
    echo "CMake 3.24+, Ninja, oneDNN 2.6+ or 3 built for OpenMP, nlohmann-json 3.11, fmt 9, CLI11 2.1, Eigen 3.3," >&2
    echo "for several hosts libfabric 1.11 and OpenSSL 3, and for the tests GoogleTest 1.12 and Google Benchmark" >&2
    echo "1.7. With these installed, run:" >&2
    echo "  cmake -S . -B build -G Ninja && cmake --build build && ctest --test-dir build" >&2
    exit 1
  fi

  # Lines of cmake/packages.txt, of which nothing is installed.
  missing=()
  for group in "${groups[@]}"; do
    while read -r names; do
      for name in $names; do
        if is_installed "$name" || [ -x "$lint_directory/bin/$name" ]; then continue 2; fi
      done
      missing+=("$names")
    done < <(sed -n "s/^$group //p" cmake/packages.txt)
  done
  [ ${#missing[@]} -gt 0 ] || return 0

  if [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2
  fi
  packages=()
  from_pypi=()
  for names in "${missing[@]}"; do
    for name in $names; do
      if has_candidate "$name"; then packages+=("$name"); continue 2; fi
    done
    # Without root, lists of packages may never have been read.
    [ "$(id -u)" = 0 ] || { packages+=("${names%% *}"); continue; }
    case $names in
      clang-format-14|clang-tidy-14) from_pypi+=("$names") ;;
      *) echo "bootstrap: this release has no package ${names// / or }; run 'apt-get update', or add its source" >&2
         exit 1 ;;
    esac
  done
  if [ "$(id -u)" != 0 ] && [ ${#packages[@]} -gt 0 ]; then
    echo "These packages are missing, and installing them needs root:" >&2
    echo "  sudo apt-get install ${packages[*]}" >&2
    exit 1
  fi
  if [ ${#packages[@]} -gt 0 ]; then
    echo "Installing ${packages[*]} ..." >&2
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2
  fi
  if [ ${#from_pypi[@]} -gt 0 ]; then
    echo "Fetching ${from_pypi[*]} from PyPI into $lint_directory ..." >&2
    rm -rf "$lint_directory"
    "${PYTHON:-python3}" -m venv "$lint_directory" >&2
    for name in "${from_pypi[@]}"; do
      "$lint_directory/bin/python" -m pip --quiet --disable-pip-version-check install "${name%-14}==$lint_version" >&2
      ln -s "${name%-14}" "$lint_directory/bin/$name"
    done
  fi
}

[ ${#groups[@]} -eq 0 ] || install_packages
if [ $cuda = yes ] && ! fetch_cutlass; then
  echo "The CUTLASS headers could not be fetched. Unpack nvidia-cutlass $cutlass_version from PyPI into" >&2
  echo "$PWD/$cutlass_directory, or configure with" >&2
  echo "-DSWITCHYARD_CUTLASS_INCLUDE=<directory with cute/ and cutlass/>." >&2
  exit 1
fi
# Only reports need it.
if [ $cuda = yes ]; then fetch_cuobjdump || true; fi
