"""What makes the site: links of pages, pictures, and documentation of plain comments."""

import re
import subprocess
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "site"))

import hooks  # noqa: E402


def filtered(tmp_path, text):
    header = tmp_path / "header.h"
    header.write_text(text)
    return subprocess.run([sys.executable, ROOT / "site/doxygen_filter.py", header], capture_output=True, text=True, check=True).stdout


def test_comments_document_what_they_stand_at(tmp_path):
    text = """// Layers.
#pragma once

// One <rank> of @world.
struct Rank {
  int index = 0;  // from 0
  int size = 0;   // of the world, which
                  // may be one
  const char* url = "http://a";
};

// A remark that belongs to nothing.

void f();
"""
    assert filtered(tmp_path, text) == """/// @file
/// Layers.
#pragma once

/// One \\<rank\\> of \\@world.
struct Rank {
  int index = 0; ///< from 0
  int size = 0; ///< of the world, which
                  ///< may be one
  const char* url = "http://a";
};

// A remark that belongs to nothing.

void f();
"""


def test_links_lead_to_pages_of_the_site():
    wanted = set()

    def change(text, page, place):
        return hooks.rewritten(text, ROOT / page, place, wanted)

    assert change("[a](docs/python.md#x)", "README.md", "index.md") == "[a](python.md#x)"
    assert change("[a](../README.md#from-c)", "docs/design.md", "design.md") == "[a](index.md#from-c)"
    assert change("[`r`](../../results/late.json)", "docs/lab/hosts.md", "lab/hosts.md") == "[`r`](../source/results/late.json.md)"
    assert change("[a](https://a.b/c.md)", "README.md", "index.md") == "[a](https://a.b/c.md)"
    assert change("```\n[a](docs/python.md)\n```\n", "README.md", "index.md") == "```\n[a](docs/python.md)\n```\n"
    assert wanted == {ROOT / "results/late.json"}
    page = hooks.source_page(ROOT / "examples/python/first.py")
    assert page.startswith("---\nsearch: {exclude: true}\n---\n\n# examples/python/first.py\n\n````python\n")
    assert "- `first.py`" in hooks.source_page(ROOT / "examples/python")


def test_pictures_follow_the_pages_own_switch():
    made = hooks.rewritten((ROOT / "README.md").read_text(), ROOT / "README.md", "index.md", set())
    assert "<picture>" not in made
    assert "](images/over-the-floor-light.svg#only-light)" in made and "](images/over-the-floor-dark.svg#only-dark)" in made


def test_every_page_of_the_navigation_exists():
    pages = re.findall(r": ([\w/]+\.md)$", (ROOT / "site/mkdocs.yml").read_text(), re.M)
    assert len(pages) > 30
    made = {*hooks.PAGES.values(), *hooks.API, "reproduced.md", "charts.md"}
    for page in pages:
        assert page in made or (ROOT / "docs" / page).exists(), page
    guides = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert guides <= set(pages), f"not in the navigation: {guides - set(pages)}"
