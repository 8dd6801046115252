"""``fldiag partition``: the bubble chart of classes over clients."""

from __future__ import annotations

from pathlib import Path

from fldiag import config as configs
from fldiag import data
from fldiag.checkpoint.run import Run
from fldiag.console import Console
from fldiag.data import partition as partitions
from fldiag.data.public import deal
from fldiag.diagnosis import subjects
from fldiag.errors import FldiagError
from fldiag.plotting import partition as picture
from fldiag.plotting import style
from fldiag.results.files import beside, csv_text, write_text


def partition(console: Console, source: str, overrides: list[str], out: Path | None, download: bool) -> None:
    if (Path(source) / "run.json").is_file():
        run = Run.open(source)
        config, folder, name = run.config, run.path / "diagnostics", "partition"
        if ":" in config.data.name and not config.data.name.startswith("npz:"):
            raise FldiagError(f"{run.path} names the data {config.data.name!r}, user code that is never run because a file "
                              "says so", "give the TOML file of the run instead of its folder")
        dataset = data.load(config.data.name, config.data.root, download, config.data.variant)
        parts = partitions.load_parts(run.verified("partition.npz"))
    else:
        config, folder = configs.load(source, overrides), subjects.FALLBACK
        spec = config.partition
        name = "-".join(["partition", config.data.name.replace(":", "-").replace("/", "-"), spec.kind,
                         *(f"{k}{v}" for k, v in spec.options.items() if k != "min_size")])
        with subjects.user_code():
            dataset = data.load(config.data.name, config.data.root, download, config.data.variant)
        parts = deal(dataset, spec, config.clients.total, config.data.public)
    path = subjects.prepare(out or folder) / name
    counts = partitions.summary(parts, dataset.train_y)
    written = write_text(beside(path, ".csv"), csv_text(counts))
    pictures = style.save(picture.draw(counts), path, ("pdf", "png"))
    sizes = [len(p) for p in parts]
    held = counts[counts["count"] > 0].groupby("client").size()
    console.table([{"clients": len(parts), "smallest": min(sizes), "largest": max(sizes), "classes": float(held.mean())}],
                  {"clients": "clients", "smallest": "smallest", "largest": "largest", "classes": "classes a client (mean)"})
    console.done(written, *pictures)
