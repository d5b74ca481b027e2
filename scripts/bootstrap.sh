#!/usr/bin/env bash
# Installs the Debian packages named on the command line that are missing, or says how to.
#   scripts/bootstrap.sh build|test|lint...
set -euo pipefail

build=(g++ cmake ninja-build libdnnl-dev nlohmann-json3-dev libfmt-dev libcli11-dev)
test=(libgtest-dev libgmock-dev libbenchmark-dev clang libclang-rt-14-dev python3)
lint=(clang-format-14 clang-tidy-14)

wanted=()
for group in "$@"; do
  case $group in
    build) wanted+=("${build[@]}") ;;
    test) wanted+=("${test[@]}") ;;
    lint) wanted+=("${lint[@]}") ;;
    *) echo "bootstrap: unknown group '$group'; use build, test or lint" >&2; exit 2 ;;
  esac
done

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
