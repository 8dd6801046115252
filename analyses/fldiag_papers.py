"""The package ``fldiag_papers`` of a clone: the folder ``papers`` beside this file, which a wheel has under this name."""

from pathlib import Path

__path__ = [str(Path(__file__).with_name("papers"))]
