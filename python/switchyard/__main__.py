"""``python -m switchyard``: the command, which the package brings along, and what only Python can do."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys


def _command() -> str | None:
    """The binary beside this file, or where SWITCHYARD_COMMAND says: a build that is worked on."""
    named = os.environ.get("SWITCHYARD_COMMAND")
    if named:
        return named
    shipped = pathlib.Path(__file__).parent / "bin" / "switchyard"
    return str(shipped) if shipped.exists() else shutil.which("switchyard")


def main() -> int:
    """Run a command; never returns for those of the binary."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["check-hf"]:
        from ._check_hf import main as check_hf

        return check_hf(arguments[1:])
    command = _command()
    if command is None:
        print(
            "the switchyard command is neither in this package nor on the PATH; install the package "
            "anew, or build it: cmake -S . -B build && cmake --build build --target switchyard_cli",
            file=sys.stderr,
        )
        return 127
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m switchyard check-hf    every expert class of transformers beside eager\n")
        sys.stdout.flush()
    os.execv(command, [command, *arguments])


if __name__ == "__main__":
    sys.exit(main())
