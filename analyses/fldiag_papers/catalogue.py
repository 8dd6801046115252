"""The list ``fldiag list figures``, from a file: names and titles without importing what trains and draws.

``python -m fldiag_papers.catalogue`` writes the file anew; a test holds it equal to the studies.
"""

from __future__ import annotations

import json
import sys
from importlib import resources

FILE = resources.files("fldiag_papers").joinpath("catalogue.json")


def figures() -> dict[str, str]:
    """Name of a study -> its title and source."""
    return dict(json.loads(FILE.read_text("utf-8")))


def text() -> str:
    """The content of the file, from the studies."""
    from fldiag_papers import reported

    titles = {name: f"{s.title} ({s.source})" for name, s in sorted(reported.studies().items())}
    return json.dumps(titles, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with resources.as_file(FILE) as file:
        file.write_text(text(), "utf-8")
        sys.stdout.write(f"{file}\n")
