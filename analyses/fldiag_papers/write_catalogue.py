"""Write the list of the figures anew from the studies: ``python -m fldiag_papers.write_catalogue``."""

from __future__ import annotations

import json
import sys
from importlib import resources

from fldiag_papers import catalogue, reported


def text() -> str:
    """The content of the file."""
    titles = {name: f"{s.title} ({s.source})" for name, s in sorted(reported.studies().items())}
    return json.dumps(titles, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with resources.as_file(resources.files("fldiag_papers") / catalogue.FILE) as file:
        file.write_text(text(), "utf-8")
        sys.stdout.write(f"{file}\n")
