#!/usr/bin/env bash
# Makes the files of a release: wheels, the source archive of the commit, what the wheels are made of (CycloneDX), and
# checksums. The wheel in cpu/ has no GPU engine. The one in cuda/, made if nvcc is there, serves both kinds of machine.
#   scripts/release.sh [--wheels DIRECTORY] [OUTPUT_DIRECTORY]      (default build/release)
# --wheels: takes the wheel of scripts/wheel.sh that is there, in place of building some.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=
if [ "${1:-}" = --wheels ]; then
  [ $# -ge 2 ] || { echo "release.sh: --wheels needs a directory" >&2; exit 2; }
  wheels=$2
  compgen -G "$wheels/switchyard_moe-*.whl" >/dev/null ||
    { echo "release.sh: --wheels is $wheels, which has no wheel; run scripts/wheel.sh, or leave the option out" >&2; exit 2; }
  shift 2
fi
[ $# -le 1 ] || { echo "release.sh: unknown arguments '${*:2}'; give one output directory" >&2; exit 2; }
out=${1:-build/release}

if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
  echo "release.sh: files are changed, and an archive of the commit would lack that; commit or undo it" >&2
  exit 2
fi
version=$(sed -n 's/^project(switchyard VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
rm -rf "$out"
mkdir -p "$out"
if [ -z "$wheels" ]; then
  scripts/wheel.sh --cpu "$out/cpu"
  ! command -v "${CUDACXX:-nvcc}" >/dev/null || scripts/wheel.sh "$out/cuda"
else
  cp "$wheels"/switchyard_moe-*.whl "$out/"
fi
while read -r wheel; do
  case $(basename "$wheel") in
    "switchyard_moe-$version-"*) ;;
    *) echo "release.sh: $wheel is not of version $version, as CMakeLists.txt has it; make it anew" >&2; exit 1 ;;
  esac
  scripts/sbom.py "$wheel" "${wheel%.whl}.cdx.json"
done < <(find "$out" -name '*.whl')
sums=$(mktemp)
git archive --format=tar.gz --prefix="switchyard-$version/" -o "$out/switchyard-$version.tar.gz" HEAD
(cd "$out" && find . -type f -printf '%P\0' | sort -z | xargs -0 sha256sum -- >"$sums" && mv "$sums" SHA256SUMS && chmod 644 SHA256SUMS)
(cd "$out" && find . -type f -printf '%s %P\n')
