"""The list ``fldiag list figures``, from a file: names and titles without importing what trains and draws.

``python -m fldiag_papers.write_catalogue`` writes the file anew; a test holds it equal to the studies.
"""

from __future__ import annotations

import json
from importlib import resources

FILE = "catalogue.json"


def figures() -> dict[str, str]:
    """Name of a study -> its title and source."""
    return dict(json.loads(resources.files("fldiag_papers").joinpath(FILE).read_text("utf-8")))
