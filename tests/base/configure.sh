#!/bin/sh
# What CMake says where something is missing: everything at once, with the command that installs it.
#   configure.sh SOURCES GENERATOR
set -eu
sources=$1
generator=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CXX CMAKE_GENERATOR

# expect_failure NAME ARGUMENTS...: configures, and leaves what CMake said in $work/NAME.log.
expect_failure() {
  name=$1
  shift
  if cmake -G "$generator" -S "$sources" -B "$work/$name" -DSWITCHYARD_CUDA=OFF "$@" >"$work/$name.log" 2>&1; then
    echo "configured without what is missing: $name"
    exit 1
  fi
}
says() { grep -q -e "$2" "$work/$1.log" || { echo "$1: no line has '$2':"; cat "$work/$1.log"; exit 1; }; }

expect_failure libraries -DCMAKE_DISABLE_FIND_PACKAGE_oneDNN=ON -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON \
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON -DSWITCHYARD_BUILD_TESTS=ON
says libraries '^ *- oneDNN 2.6'
says libraries '^ *- fmt 9'
says libraries '^ *- GoogleTest 1.12.*SWITCHYARD_BUILD_TESTS'
says libraries 'scripts/bootstrap.sh build'
says libraries 'apt-get install .*g++.*libdnnl-dev.*libfmt-dev'

CXX=$work/no-compiler expect_failure compiler
says compiler 'C++20 compiler'
says compiler 'scripts/bootstrap.sh build'

# The libraries of tests and benchmarks are not a user's: without them, they are left out.
cmake -G "$generator" -S "$sources" -B "$work/plain" -DSWITCHYARD_CUDA=OFF -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON \
  -DCMAKE_DISABLE_FIND_PACKAGE_benchmark=ON >"$work/plain.log" 2>&1 || { cat "$work/plain.log"; exit 1; }
says plain 'GoogleTest 1.12 is not installed, so SWITCHYARD_BUILD_TESTS is OFF'
says plain 'Google Benchmark 1.7 is not installed, so SWITCHYARD_BUILD_BENCH is OFF'
echo "ok"
