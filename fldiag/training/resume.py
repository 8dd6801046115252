"""What must be the same for a stored run to go on: config (but for more rounds), version of the method, data and partition."""

from __future__ import annotations

from typing import Any

from fldiag.config import Config
from fldiag.data import partition
from fldiag.errors import FldiagError
from fldiag.results.table import PERSONAL
from fldiag.runs import base
from fldiag.runs.run import RECORD, Run
from fldiag.training.setup import Setup


def check_same_config(run: Run, config: Config) -> None:
    """Raises FldiagError unless ``config`` is what the run was begun with, by the same version of the method. What the
    checkpoints are to hold may differ, and there may be more rounds."""
    if run.origin:
        raise FldiagError(
            f"{run.path} was trained with another config, by another program",
            "train again with another --out; the existing run can still be diagnosed",
            usage=True,
        )
    former, version = run.config, run.method_version
    if run.index["hash"] != former.hash:
        raise FldiagError(
            f"{run.path / 'run.json'}: its hash is not that of its config",
            "the file was edited; restore it or train again",
        )
    if not same_but_rounds(former, config) or config.rounds < former.rounds:
        raise FldiagError(
            f"{run.path} was trained with another config", difference(former, config), usage=True
        )
    if version != config.method_version:
        name = config.method.name
        raise FldiagError(
            f"{run.path} was trained by version {version} of the formulas of {name}, and this fldiag "
            f"has version {config.method_version}: the two parts of the run would follow different formulas "
            f"(fldiag explain {name} says what changed)",
            "train again with another --out; the existing run can still be diagnosed",
            usage=True,
        )


def same_but_rounds(a: Config, b: Config) -> bool:
    """Whether two configs train the same, one perhaps for more rounds."""
    return a.model_copy(update={"rounds": b.rounds}).hash == b.hash


def check_weights(run: Run) -> None:
    """Raises FldiagError for the record of a run."""
    if run.is_record:
        raise FldiagError(
            f"{run.path} {RECORD}, from which training cannot go on",
            "train again with another --out",
            usage=True,
        )


def extend(run: Run, config: Config) -> None:
    """Make a run one of more rounds: its index only, which the next ``append`` or ``commit`` writes.

    What the former last round stored because it was the last stays: its checkpoint, its steps, and the table with the clients'
    own models. ``extended`` in run.json says what that is, so that everything else is what training for all the rounds at
    once gives.

    Raises FldiagError when the clients' states, with which training would go on, were removed.
    """
    former, index = run.config, run.index
    if index.get("thinned", {}).get("state"):
        raise FldiagError(
            f"{run.path} no longer has the clients' states, from which more rounds would start",
            "train again with another --out",
            usage=True,
        )
    index["config"]["rounds"], index["hash"], index["status"] = (
        config.rounds,
        config.hash,
        "running",
    )
    if run.done < former.rounds:
        return
    last, stays = former.rounds, list[str]()
    checkpoint = run.round_file(last)
    if last % config.checkpoint.every and checkpoint in index["files"]:
        stays.append(checkpoint)
    if former.metrics.of_round(last, last) and not config.metrics.of_round(last, config.rounds):
        stays.append(f"steps/{last:04d}.parquet")
    table = index.get("metrics")
    digest = index["files"].get(table)
    if run.drop_metrics(lambda row: str(row["metric"]).startswith(PERSONAL)):
        index["files"][table] = digest
        stays.append(str(table))
    index["extended"] = [*index.get("extended", []), {"rounds": last, "stays": stays}]


def check_same_data(run: Run, setup: Setup) -> None:
    """Raises FldiagError when data or partition are not those that the run began with."""
    if run.index["provenance"].get("data") != setup.dataset.fingerprint():
        raise FldiagError(
            f"the data set {setup.dataset.name!r} is not the one {run.path} was trained on so far",
            "put the original data back, or train again with another --out",
        )
    if run.index["provenance"].get("base") != base.provenance(setup.module).get("base"):
        raise FldiagError(
            f"the frozen weights are not those beneath the adapters of {run.path}",
            "train again with another --out",
        )
    parts = partition.load_parts(run.verified("partition.npz"))
    if not partition.same(parts, setup.parts):
        raise FldiagError(
            f"the partition is not the one {run.path} was trained with so far",
            "use the same partition, or train again with another --out",
        )


def difference(former: Config, config: Config) -> str:
    """One line naming the first keys that differ, apart from what the checkpoints hold."""
    old, new = (_flat(c.model_dump(mode="json", exclude={"checkpoint"})) for c in (former, config))
    lines = [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return "; ".join(lines[:3]) + "; use another --out, or the same config"


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}" if key else section: value
        for section, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
