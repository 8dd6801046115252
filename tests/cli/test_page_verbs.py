"""The documentation is run: every block of every page, in its order, in an empty folder with the two example checkpoints.

A ``sh`` block is typed into this process, a ``python`` block is executed, and one whose first line names a file is written to it. What
only an install or another machine can run is a ``console`` block, and those install, or name what this test runs elsewhere.
"""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import commands
import pytest

DOCS = Path(__file__).parents[2] / "docs"
#: Pages whose commands need what a test of their own lays out.
ELSEWHERE = {
    "clusters.md": "test_clusters_page.py",
    "frameworks.md": "test_other_frameworks.py",
}
PAGES = sorted(
    p
    for p in DOCS.rglob("*.md")
    if "made" not in str(p.parent) and p.name not in ELSEWHERE and "_ext" not in p.parts
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CONSOLE = (
    "$ pip install",
    "$ python flower_digits.py",
    "$ fldiag forgetting runs/flower",
    "$ fldiag convert received/",
    "    --model small_cnn",
    "$ fldiag forgetting theirs",
    "$ fldiag spectrum my-bert/",
    "$ fldiag doctor runs/mine",
)
pytestmark = pytest.mark.slow


def blocks(page):
    return BLOCK.findall(page.read_text("utf-8"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    shutil.copytree(DOCS.parent / "checkpoints" / "example", tmp_path / "checkpoints" / "example")
    shutil.copy(DOCS / "own_loop.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:  # modules that a page wrote
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(
            tmp_path
        ):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(kind in ("sh", "python") for kind, _ in blocks(p))],
    ids=lambda p: str(p.relative_to(DOCS)),
)
def test_every_block_runs(page, place):
    names = {}
    for kind, text in blocks(page):
        if kind == "python" and (named := re.match(r"# (\w+\.py)\n", text)):
            Path(named[1]).write_text(text)
        elif kind == "python":
            exec(compile(text, str(page), "exec"), names)
        elif kind == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line, comments=True) or ["true"]
                if program == "python":
                    runpy.run_path(arguments[0], run_name="__main__")
                elif program != "true":
                    assert program == "fldiag", line
                    found = commands.invoke(*arguments)
                    assert found.exit_code in ((0, 3) if arguments[0] == "check" else (0,)), (
                        line,
                        found.output,
                        found.exception,
                    )


def test_what_is_not_run_is_known():
    for page in PAGES:
        for kind, text in blocks(page):
            assert kind in ("sh", "python", "console", "toml", "text", "yaml"), (page, kind)
            if kind == "console":
                assert all(line.startswith(CONSOLE) for line in text.splitlines()), (page, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8")):
        target = (page.parent / link).resolve()
        assert target.exists() or "made" in target.parts, (
            page,
            link,
        )
