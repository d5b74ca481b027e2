#!/usr/bin/env python3
"""Lists the tests that were skipped, with their reasons, from reports in JUnit's format (ctest's and pytest's).

    skipped_tests.py [--allow FILE] REPORT.xml...

With --allow, fails if a test was skipped for a reason that FILE does not have. A line of FILE is a regular expression
of a reason, " -- ", and why nothing can be done about it where the tests run. Lines that begin with # are comments.
"""

import argparse
import collections
import pathlib
import re
import sys
import textwrap
import xml.etree.ElementTree as ElementTree


def reason_of(case: ElementTree.Element) -> str:
    skipped = case.find("skipped")
    output = case.findtext("system-out") or ""
    if skipped is not None and skipped.get("type", "").startswith("pytest"):
        return skipped.get("message", "")
    # GoogleTest: the lines after "file.cpp:12: Skipped". Other programs say "skipped: why".
    found = re.search(r": Skipped\n(.*?)\n\s*(?:\n|\[)", output, re.S) or re.search(r"^skipped: (.*)$", output, re.M)
    if found:
        return " ".join(found.group(1).split())
    # ctest looked for a text somewhere in it (SKIP_REGULAR_EXPRESSION).
    return " ".join(output.split()) or "no reason was given"


def skips(path: pathlib.Path) -> list[tuple[str, str]]:
    """(test, reason) of each skipped test of a report. GoogleTest's DISABLED_ tests are left out: other tests start
    them as ranks."""
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            name = case.get("name", "")
            module = case.get("classname", "")
            found.append((f"{module}.{name}" if module not in ("", name) else name, reason_of(case)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow", type=pathlib.Path)
    parser.add_argument("reports", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()

    by_reason: dict[str, list[str]] = collections.defaultdict(list)
    for report in arguments.reports:
        for name, reason in skips(report):
            by_reason[reason].append(f"{report.stem}: {name}")
    allowed = []
    if arguments.allow:
        for line in arguments.allow.read_text().splitlines():
            if line and not line.startswith("#"):
                expression, separator, why = line.partition(" -- ")
                if not separator or not why:
                    sys.exit(f"{arguments.allow}: '{line}' has no ' -- ' and reason behind it")
                allowed.append(re.compile(expression))

    refused = 0
    for reason, names in sorted(by_reason.items()):
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        print(f"  {len(names):4d}  {textwrap.shorten(reason, 200)}\n        {few}")
        if arguments.allow and not any(expression.search(reason) for expression in allowed):
            print(f"        this reason is not in {arguments.allow}: the test could run here")
            refused += len(names)
    if not by_reason:
        print("  none")
    if refused:
        print(f"skipped_tests: {refused} tests were skipped that could run", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
