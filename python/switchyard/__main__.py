"""The command ``switchyard``, also as ``python -m switchyard``: the program that the package brings along, and
what only Python can do."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

_CHECK_HF = "check-hf"


def _command() -> str | None:
    """The program beside this file, or where SWITCHYARD_COMMAND says: a build that is worked on."""
    named = os.environ.get("SWITCHYARD_COMMAND")
    if named:
        return named
    shipped = pathlib.Path(__file__).parent / "bin" / "switchyard"
    return str(shipped) if shipped.exists() else _on_path()


def _on_path() -> str | None:
    """The first program named switchyard on the PATH. The script that calls main() has this name, too, and would
    run itself for ever."""
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory or os.curdir, "switchyard")
        try:
            with open(path, "rb") as file:
                if os.access(path, os.X_OK) and file.read(2) != b"#!":
                    return path
        except OSError:
            continue
    return None


def main() -> int:
    """Run a command; returns only for check-hf and for a program that cannot be run."""
    arguments = sys.argv[1:]
    if arguments[:1] == [_CHECK_HF]:
        from ._check_hf import main as check_hf

        return check_hf(arguments[1:])
    command = _command()
    if command is None:
        print(
            "switchyard: the command's program is neither in this package nor on the PATH; install the package "
            "anew, or build it: cmake -S . -B build && cmake --build build --target switchyard_cli",
            file=sys.stderr,
        )
        return 127
    if not arguments or arguments[0] in ("-h", "--help"):
        module = os.path.basename(sys.argv[0]) == "__main__.py"
        name = "python -m switchyard" if module else "switchyard"
        print(f"{name} {_CHECK_HF}    every expert class of transformers beside eager\n")
        sys.stdout.flush()
    # Python ignores SIGPIPE, and a program keeps that: `switchyard models | head -1` would end in an error.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execv(command, [command, *arguments])
    except OSError as error:
        named = " (SWITCHYARD_COMMAND)" if os.environ.get("SWITCHYARD_COMMAND") else ""
        print(
            f"switchyard: {command}{named} cannot be run: {error.strerror}; install the package for this platform "
            "(Linux, x86-64 or AArch64), or let SWITCHYARD_COMMAND name a program that runs here",
            file=sys.stderr,
        )
        return 127


if __name__ == "__main__":
    sys.exit(main())
