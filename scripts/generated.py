"""Files that scripts make of results/ and examples/."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def write_or_check(made):
    """Writes the texts of {path: text}, where they are not there yet; with --check on the command line
    only names their files. Returns the script's exit code: 1 if --check found one."""
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    checking = "--check" in sys.argv
    for path in stale:
        if checking:
            print(f"{path.relative_to(ROOT)} is not what scripts/{pathlib.Path(sys.argv[0]).name} makes")
        else:
            path.write_text(made[path])
    return 1 if stale and checking else 0
