"""Scalars as TensorBoard event files."""

from __future__ import annotations

import json
from pathlib import Path

from fldiag.export.scalars import Scalars, need
from fldiag.results.files import refuse_links_above


def export(scalars: Scalars, out: Path) -> Path:
    """Write ``out/NAME/events.out.tfevents…`` (earlier ones there are replaced) and return that folder; look at it with
    ``tensorboard --logdir out``. Raises FldiagError without TensorBoard."""
    need("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = out / scalars.name
    refuse_links_above(folder)
    earlier = list(folder.glob("events.out.tfevents.*"))
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("config", f"```\n{json.dumps(scalars.config, indent=1)}\n```")
        for tag, step, value in scalars.series[["tag", "step", "value"]].itertuples(index=False):
            writer.add_scalar(tag, value, step, new_style=True, double_precision=True)
    for file in earlier:
        file.unlink(missing_ok=True)
    return folder
