"""Compress the large tables beside figures: FIGURE.csv becomes FIGURE.csv.gz, which all that reads figures reads as well.

    python analyses/pack_tables.py figures

The json beside a table keeps the name and the sha256 of the csv, which is what is in the archive (``zcat`` shows it).
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

#: Bytes from which a table is compressed.
LARGE = 500_000


def pack(folder: Path) -> list[Path]:
    """The compressed tables; the same content gives the same bytes."""
    tables = [file for file in sorted(folder.rglob("*.csv")) if file.stat().st_size >= LARGE]
    for file in tables:
        packed = file.with_name(f"{file.name}.gz")
        packed.write_bytes(gzip.compress(file.read_bytes(), 9, mtime=0))
        file.unlink()
    return [file.with_name(f"{file.name}.gz") for file in tables]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for file in pack(parser.parse_args().folder):
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
