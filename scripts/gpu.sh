#!/usr/bin/env bash
# Everything that needs a GPU: tests, compute-sanitizer, measurements. Goes on after failures and ends
# with a table of what happened; its exit code is 0 if all of it passed.
#
#   scripts/gpu.sh [OPTION...] [STAGE...]       build here, then run the stages (default: all)
#   scripts/gpu.sh --prebuilt DIR [STAGE...]    run binaries that --pack made on another machine
#   scripts/gpu.sh --pack DIR                   build here, and collect in DIR what --prebuilt needs
#
# Stages
#   test       every GPU test
#   sanitize   memcheck and synccheck on the tests that --sanitize-filter names
#   rival      the PyTorch chain's own check
#   bench      the suites, beside PyTorch, merged into SUITE.json
#
# Options
#   --out DIR               for JSON, gpu.log and summary.txt (default $OUT; else results/ for the
#                           JSON and build/gpu/ for the others)
#   --build DIR             where to build (default build)
#   --commit TEXT           commit to note in the JSON (default: what git or the pack says)
#   --filter PATTERN        of --gtest_filter, for test (default *)
#   --sanitize-filter PAT   likewise for sanitize (default: some tests of small shapes)
#   --tools "A B"           sanitizer tools (default "memcheck synccheck"; racecheck does not follow the
#                           kernel's task queue, see docs/decisions/0008)
#   --suites "A B"          suites to measure (default "one_gpu_bf16 one_gpu_thesis one_gpu_fp8
#                           one_gpu_fp8_more" or, with several GPUs, "ep_thesis ep_bf16 ep_fp8")
#   --bench-args "..."      further arguments of switchyard bench (default "--against torch" or, of
#                           suites for several GPUs, none)
#   --limit SECONDS         for each step (default 240; bench 480)
set -uo pipefail
cd "$(dirname "$0")/.."

prebuilt='' pack='' build=build out=${OUT:-} commit=''
filter='*' sanitize_filter='GpuTypes.*:GpuWeights.*:GpuRouting.EmptySlots*:GpuRouting.NoTokens*:GpuRouting.DeepExperts:GpuFp8.EveryEndOfTheLastGroup:RanksTest.EmptySlots*:*Sanitize*:RouteWarp.HashedIds*' tools='memcheck synccheck'
suites='' bench_args=default limit=''
stages=()
usage() { sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; }
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage; exit 0 ;;
    --prebuilt | --pack | --build | --out | --commit | --filter | --sanitize-filter | --tools | \
      --suites | --bench-args | --limit)
      [ $# -ge 2 ] || { echo "gpu.sh: $1 needs a value" >&2; exit 2; }
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      shift 2 ;;
    test | sanitize | rival | bench) stages+=("$1"); shift ;;
    *) echo "gpu.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || stages=(test sanitize rival bench)
json_dir=${out:-results}
log_dir=${out:-build/gpu}

git_commit() {
  command -v git >/dev/null || return 0
  git rev-parse --git-dir >/dev/null 2>&1 || return 0
  echo "$(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo +)"
}

build_here() {
  if ! scripts/bootstrap.sh build test cuda || ! command -v nvcc >/dev/null; then
    echo "gpu.sh: the build's dependencies are not here; on a machine that has them make binaries" >&2
    echo "  scripts/gpu.sh --pack DIR, bring DIR along, and run scripts/gpu.sh --prebuilt DIR" >&2
    return 1
  fi
  local targets=(switchyard_cli)
  [ ! -d tests/gpu ] || targets+=(tests/gpu/all)
  cmake -S . -B "$build" -G Ninja -DSWITCHYARD_CUDA=ON -DSWITCHYARD_BUILD_CLI=ON -DSWITCHYARD_BUILD_TESTS=ON >/dev/null &&
    cmake --build "$build" --target "${targets[@]}"
}

gpu_tests_of() { find "$1" -maxdepth 1 -type f -executable -name '*_test' | sort; }

# glibc and the C++ runtime are the other machine's: an older copy of ours would break what else runs
# there, and theirs, being as new or newer, serves our binaries.
libraries_of() {
  ldd "$@" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | sort -u |
    grep -vE '/(ld-linux|libc|libm|libmvec|libdl|librt|libresolv|libpthread|libgcc_s|libstdc\+\+)[-.]'
}

if [ -n "$pack" ]; then
  set -e
  build_here
  rm -rf "$pack"
  mkdir -p "$pack/bin" "$pack/lib"
  binaries=("$build/src/cli/switchyard")
  if [ -d "$build/tests/gpu" ]; then mapfile -t -O 1 binaries < <(gpu_tests_of "$build/tests/gpu"); fi
  for binary in "${binaries[@]}"; do strip -o "$pack/bin/$(basename "$binary")" "$binary"; done
  for library in $(libraries_of "${binaries[@]}"); do
    # Under the name that the binaries ask for; compressed, for oneDNN alone is 39 MB.
    gzip -9 <"$library" >"$pack/lib/$(basename "$library").gz"
  done
  git_commit >"$pack/COMMIT"
  du -ah "$pack" | sort -k2
  if [ "$(du -sm "$pack" | cut -f1)" -ge 50 ]; then
    echo "gpu.sh: $pack is too large to travel; leave out tests or strip more" >&2
    exit 1
  fi
  exit 0
fi

mkdir -p "$json_dir" "$log_dir"
log=$log_dir/gpu.log
: >"$log"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
library_path=${LD_LIBRARY_PATH:-}

if [ -n "$prebuilt" ]; then
  mkdir "$scratch/lib"
  for archive in "$prebuilt"/lib/*.gz; do
    [ -e "$archive" ] && gunzip <"$archive" >"$scratch/lib/$(basename "$archive" .gz)"
  done
  switchyard=$prebuilt/bin/switchyard
  mapfile -t tests < <(gpu_tests_of "$prebuilt/bin")
  [ -n "$commit" ] || commit=$(cat "$prebuilt/COMMIT" 2>/dev/null)
  our_libraries=$scratch/lib:$prebuilt/lib${library_path:+:$library_path}
else
  build_here || exit 1
  switchyard=$build/src/cli/switchyard
  mapfile -t tests < <([ ! -d "$build/tests/gpu" ] || gpu_tests_of "$build/tests/gpu")
  [ -n "$commit" ] || commit=$(git_commit)
  our_libraries=$library_path
fi
# Python must not find our libraries before its own.
cat >"$scratch/python3" <<WRAPPER
#!/bin/sh
LD_LIBRARY_PATH='$library_path' exec '$(command -v python3)' "\$@"
WRAPPER
chmod +x "$scratch/python3"

outcomes=()
failed=0
# step NAME LIMIT COMMAND...: with our libraries, a time limit, and its output in the log.
step() {
  local name=$1 seconds=${limit:-$2} status=0 begin=$SECONDS outcome
  shift 2
  printf '\n== %s\n' "$name" | tee -a "$log"
  LD_LIBRARY_PATH=$our_libraries timeout -k 10 "$seconds" "$@" 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]}
  case $status in
    0) outcome=passed ;;
    124 | 137) outcome="TIMED OUT after $seconds s" ;;
    *) outcome="FAILED, exit code $status" ;;
  esac
  [ "$status" = 0 ] || failed=1
  outcomes+=("$(printf '%-40s %6d s  %s' "$name" $((SECONDS - begin)) "$outcome")")
}
skip() { outcomes+=("$(printf '%-40s %8s  %s' "$1" '' "skipped: $2")"); }

stage_test() {
  [ ${#tests[@]} -gt 0 ] || skip test "there are no GPU tests"
  for test in "${tests[@]}"; do
    step "test $(basename "$test")" 240 "$test" --gtest_brief=1 "--gtest_filter=$filter"
  done
}

stage_sanitize() {
  local sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  if [ ! -x "$sanitizer" ]; then skip sanitize "there is no compute-sanitizer"; return; fi
  local any=no
  for test in "${tests[@]}"; do
    LD_LIBRARY_PATH=$our_libraries "$test" --gtest_list_tests "--gtest_filter=$sanitize_filter" |
      grep -q '^  ' || continue
    any=yes
    for tool in $tools; do
      step "$tool $(basename "$test")" 240 "$sanitizer" --tool "$tool" --error-exitcode 99 \
        "$test" --gtest_brief=1 "--gtest_filter=$sanitize_filter"
    done
  done
  [ $any = yes ] || skip sanitize "no test matches $sanitize_filter"
}

stage_rival() {
  step "PyTorch chain" 240 "$scratch/python3" bench/torch_chain.py --check
}

stage_bench() {
  local json arguments
  if [ -z "$suites" ]; then
    suites='one_gpu_bf16 one_gpu_thesis one_gpu_fp8 one_gpu_fp8_more'
    if [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ]; then suites='ep_thesis ep_bf16 ep_fp8'; fi
  fi
  for suite in $suites; do
    json=$json_dir/$suite.json
    # Points that are not measured now keep their rows.
    if [ ! -e "$json" ] && [ -e "results/$suite.json" ]; then cp "results/$suite.json" "$json"; fi
    arguments=$bench_args
    if [ "$arguments" = default ]; then
      case $suite in ep_* | astero | grouped) arguments='' ;; *) arguments='--against torch' ;; esac
    fi
    # shellcheck disable=SC2086
    step "bench $suite" 480 "$switchyard" bench layers --suite "$suite" --json "$json" \
      --commit "${commit:-unknown}" --python "$scratch/python3" \
      --torch-script bench/torch_chain.py $arguments
  done
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
    echo "no nvidia-smi here"
  echo "commit ${commit:-unknown}"
} | tee -a "$log"
for stage in "${stages[@]}"; do "stage_$stage"; done

printf '\n' | tee -a "$log"
printf '%s\n' "${outcomes[@]}" | tee "$log_dir/summary.txt" | tee -a "$log"
exit $failed
