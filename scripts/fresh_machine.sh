#!/usr/bin/env bash
# Does what README says on a machine where nothing is installed: a fresh root file system of a Debian release, in which
# README's first commands, ./run, examples of the command, those from C++, scripts/reproduce.py and ./test run one after the other.
#   scripts/fresh_machine.sh [--steps "install run commands cpp reproduce test"] [--wheel FILE] [--keep] [RELEASE...]
# Releases are bookworm and trixie unless given.
# --wheel: copies that wheel and scripts/try_wheel.sh into the root, and no sources; the only step is to try it with the
# release's Python (sid has a newer one).
# Needs root and debootstrap, and 12 GB in build/fresh, which --keep leaves there. Packages come from this machine's own
# sources of apt and pip. The logs are build/fresh/RELEASE.log.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "fresh_machine: $1" >&2; exit "${2:-1}"; }
steps="install run commands cpp reproduce test"
keep=
wheel=
releases=()
while [ $# -gt 0 ]; do
  case $1 in
    --steps) [ $# -ge 2 ] || fail "--steps needs steps" 2; steps=$2; shift ;;
    --wheel) [ $# -ge 2 ] && [ -e "$2" ] || fail "--wheel needs a file" 2; wheel=$2; shift ;;
    --keep) keep=yes ;;
    -*) fail "unknown option '$1'; use --steps, --wheel or --keep" 2 ;;
    *) releases+=("$1") ;;
  esac
  shift
done
[ ${#releases[@]} -gt 0 ] || releases=(bookworm trixie)
for step in $steps; do
  case $step in
    install|run|commands|cpp|test|reproduce) ;;
    test:*) ;;
    *) fail "unknown step '$step'; use install, run, commands, cpp, reproduce, test or test:STEP (a step of ./test)" 2 ;;
  esac
done
[ -z "$wheel" ] || steps=wheel
[ "$(id -u)" = 0 ] || fail "making a root file system needs root"
command -v debootstrap >/dev/null || fail "there is no debootstrap; run 'apt-get install debootstrap'"
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -1)
[ -n "$mirror" ] || fail "apt has no source of Debian's packages; run 'apt-get update'"

# readme_commands MARK: what README tells a user to type, the first block of commands behind that mark. What && joins gets lines of
# its own, because bash goes on after a command that fails before &&.
readme_commands() { sed -n "/^<!-- $1 -->\$/,/^\`\`\`\$/p" README.md | sed '1,2d;$d; s/ && /\n/g'; }
for mark in install commands "install from C++"; do
  [ -n "$(readme_commands "$mark")" ] || fail "README.md has no commands behind its mark '$mark'"
done
grep -q '^scripts/reproduce.py all ' README.md || fail "README.md has no command 'scripts/reproduce.py all'"

# make_root DIRECTORY RELEASE
make_root() {
  debootstrap --variant=minbase "$2" "$1" "$mirror"
  echo "deb $mirror $2 main" >"$1/etc/apt/sources.list"
  # How this machine reaches its sources, and nothing else of it.
  apt-config dump | grep '^Acquire::' >"$1/etc/apt/apt.conf.d/99machine" || true
  cp /etc/resolv.conf "$1/etc/"
  # As an installer leaves it.
  printf '127.0.0.1 localhost %s\n::1 localhost\n' "$(uname -n)" >"$1/etc/hosts"
  # Not under /etc/ssl, which the package ca-certificates writes anew.
  cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$1/etc/machine-certificates.crt" 2>/dev/null || true
  cp /etc/pip.conf "$1/etc/" 2>/dev/null || true
  mkdir "$1/switchyard"
  if [ -n "$wheel" ]; then
    cp "$wheel" scripts/try_wheel.sh "$1/switchyard/"
  else
    git archive HEAD | tar -x -C "$1/switchyard"
  fi
  {
    echo 'set -euo pipefail; cd /switchyard'
    # Processor time of children, which `times` has on its second line.
    echo 'say() { times >/times; printf "\n### %s (%d s; processor time so far: %s)\n" "$1" "$SECONDS" "$(tail -1 /times)"; }'
    for step in $steps; do
      echo "say $step"
      case $step in
        install) readme_commands install; echo 'deactivate' ;;
        # The examples of `switchyard`, with the checkpoint that ./run has made, and without those for a GPU.
        commands) echo '. .venv/bin/activate'
             readme_commands commands | sed -n 's/ *#.*//; /--backend cuda/d; /^switchyard/p' |
               sed 's|--checkpoint DIR --layer 3|--checkpoint build/olmoe-1-layer --layer 0|'
             echo 'deactivate' ;;
        cpp) readme_commands "install from C++"
             # And a program of a user's, over that checkpoint.
             printf '%s\n' 'cmake -S examples/forward -B /example -G Ninja' 'cmake --build /example' '/example/forward build/olmoe-1-layer 0' ;;
        run) echo './run' ;;
        test) echo './test' ;;
        test:*) echo "./test ${step#test:}" ;;
        reproduce) printf '%s\n' '. .venv/bin/activate' 'scripts/reproduce.py all' 'deactivate' ;;
        # Of the release come Python and what its virtual environments need, and no library that the wheel could miss.
        wheel) printf '%s\n' 'apt-get update -qq' 'apt-get install -y -qq --no-install-recommends python3-venv'
               echo './try_wheel.sh ./*.whl' ;;
      esac
    done
    echo 'say "all passed"'
  } >"$1/steps.sh"
}

# run_in DIRECTORY. Devices, processes and mounts are the machine's own, and end with the process that made them: what
# runs there as root can spoil nothing here.
run_in() {
  local variables=(HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin) name
  [ ! -e "$1/etc/machine-certificates.crt" ] || variables+=(PIP_CERT=/etc/machine-certificates.crt)
  for name in http_proxy https_proxy no_proxy PIP_INDEX_URL PIP_DEFAULT_TIMEOUT; do
    [ -z "${!name:-}" ] || variables+=("$name=${!name}")
  done
  unshare --mount --pid --ipc --fork sh -c '
    set -e
    root=$0
    # A mount of its own, or what makes network namespaces there could not change how it is shared.
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/net"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    while read -r device major minor; do
      mknod -m 666 "$root/dev/$device" c "$major" "$minor"
    done <<DEVICES
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
net/tun 10 200
DEVICES
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    for number in 0 1 2; do ln -s "fd/$number" "$root/dev/$(echo stdin stdout stderr | cut -d" " -f$((number + 1)))"; done
    exec env -i "$@" chroot "$root" bash /steps.sh' "$1" "${variables[@]}"
}

mkdir -p build/fresh
failed=()
for release in "${releases[@]}"; do
  root=$PWD/build/fresh/$release
  log=build/fresh/$release.log
  rm -rf --one-file-system "$root"
  echo "== $release, log in $log"
  if make_root "$root" "$release" >"$log" 2>&1 && run_in "$root" >>"$log" 2>&1 </dev/null; then
    grep -A1 '^###' "$log" | grep -v '^--' || true
  else
    failed+=("$release")
    tail -30 "$log"
  fi
  [ -n "$keep" ] || rm -rf --one-file-system "$root"
done
[ ${#failed[@]} -eq 0 ] || fail "these releases failed: ${failed[*]}"
echo "all passed"
