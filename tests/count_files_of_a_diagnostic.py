"""How many files of the library somebody touches who adds a diagnostic: ``python -m tests.count_files_of_a_diagnostic``.

The made-up package of ``tests/cli/test_plugin.py`` is the proof; this counts which files name a built-in diagnostic, so that a
list of names growing somewhere shows.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Generated, or prose: nobody edits these for a diagnostic to work.
NOT_CODE: set[str] = set()


def files(name: str) -> list[str]:
    """The files outside the diagnostic's own place that name it."""
    word = re.compile(rf"[\"']{name}[\"'.:]|diagnostics\.{name}\b|diagnostics import .*\b{name}\b")
    found = []
    for path in sorted((ROOT / "fldiag").rglob("*.py")):
        own = f"diagnostics/{name}" in path.as_posix()
        if (
            not own
            and path.relative_to(ROOT).as_posix() not in NOT_CODE
            and word.search(path.read_text())
        ):
            found.append(path.relative_to(ROOT).as_posix())
    return found


if __name__ == "__main__":
    for name in (
        "matching",
        "drift",
        "forgetting",
        "spectrum",
        "landscape",
        "account",
    ):
        print(f"{name}: {len(files(name))} other files name it: {', '.join(files(name))}")
    made = [
        p.relative_to(ROOT).as_posix()
        for p in sorted((ROOT / "tests").rglob("*.py"))
        if p.stem in ("stride", "test_plugin")
    ]
    named = files("stride")
    print(f"the made-up package touches {len(made) + len(named)} files: {', '.join(made + named)}")
