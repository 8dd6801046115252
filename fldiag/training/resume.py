"""What must be the same for a stored run to go on: config, version of the method, data and partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from fldiag.checkpoint.run import Run
from fldiag.config import Config
from fldiag.data import partition
from fldiag.errors import FldiagError
from fldiag.training.setup import Setup


def same_run(run: Run, config: Config) -> None:
    """Raises FldiagError unless ``config`` is what the run was begun with, by the same version of the method. What the
    checkpoints are to hold may differ."""
    if run.origin:
        raise FldiagError(f"{run.path} was trained with another config, by another program",
                          "train anew with another --out; what is there can be diagnosed", usage=True)
    stored, version = run.config, run.method_version
    if run.index["hash"] not in {stored.fingerprint(version=version, checkpoint=with_it) for with_it in (False, True)}:
        raise FldiagError(f"{run.path / 'run.json'}: its hash is not that of its config",
                          "the file was edited; restore it or train again")
    if stored.fingerprint(version=1) != config.fingerprint(version=1):
        raise FldiagError(f"{run.path} was trained with another config", difference(stored, config), usage=True)
    if version != config.method_version:
        raise FldiagError(f"{run.path} was trained by version {version} of the formulas of {config.method.name}, and this fldiag "
                          f"has version {config.method_version}: half of each would be neither (fldiag explain "
                          f"{config.method.name} says what changed)",
                          "train anew with another --out; what is there can be diagnosed as it is", usage=True)


def same_data(run: Run, setup: Setup) -> None:
    """Raises FldiagError when data or partition are not those that the run began with."""
    if run.index["provenance"].get("data") != setup.dataset.fingerprint():
        raise FldiagError(f"the data set {setup.dataset.name!r} is not the one {run.path} was trained on so far",
                          "put the original data back, or train anew with another --out")
    stored = partition.load_parts(run.verified("partition.npz"))
    if len(stored) != len(setup.parts) or not all(map(np.array_equal, stored, setup.parts)):
        raise FldiagError(f"the partition is not the one {run.path} was trained with so far",
                          "use the same partition, or train anew with another --out")


def difference(old: Config, new: Config) -> str:
    """One line naming the first keys that differ, apart from what the checkpoints hold."""
    before, after = (_flat(c.model_dump(mode="json", exclude={"checkpoint"})) for c in (old, new))
    found = [f"{key}: {before.get(key)!r} there, {after.get(key)!r} now" for key in sorted(before.keys() | after.keys())
             if before.get(key) != after.get(key)]
    return "; ".join(found[:3]) + "; use another --out, or the same config"


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}" if key else section: value for section, values in tree.items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])}
