"""What a finished run was trained with, made again: for diagnostics that train on from it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fldiag import user_code
from fldiag.checkpoint.run import Run
from fldiag.data import partition
from fldiag.errors import FldiagError
from fldiag.training.setup import Setup


def setup_of(
    run: Run,
    *,
    device: str = "auto",
    root: str | None = None,
    download: bool = False,
    model: str | None = None,
    data: str | None = None,
) -> Setup:
    """The run's data, partition, network and method. ``model``, ``data``: the names that the run has, as a consent to import
    them; ``Run.allow_code`` is the other.

    Raises FldiagError for a run that is not finished or of another program, user code without consent, and data other than
    the run's.
    """
    if run.origin:
        raise FldiagError(
            f"{run.path} was trained by another program, and training again needs its config",
            "give a run that fldiag trained",
        )
    if run.status != "finished":
        remedy = (
            "choose another run"
            if run.status == "diverged"
            else "finish it: fldiag train with the same config, --out and --resume"
        )
        raise FldiagError(
            f"run {run.path} is {run.status} after {run.done} of {run.config.rounds} rounds, and clients start "
            "from the final model",
            remedy,
        )
    config = run.config
    for section, name, given in (
        ("model", config.model.name, model),
        ("data", config.data.name, data),
    ):
        if given is not None and given != name:
            raise FldiagError(
                f"{run.path} was trained with {section} {name!r}, not {given!r}",
                f"leave out --{section}",
                usage=True,
            )
    config = config.allow(
        [name for name in (model, data) if name is not None and user_code.is_code(name)]
    )
    user_code.check(config.model_dump(), config.allowed_code, run.path)
    stored = config.data.root
    here = root or (stored if stored is not None and Path(stored).is_dir() else None)
    setup = Setup(
        config.replace(data__root=here),
        device=device,
        download=download,
        parts=partition.load_parts(run.verified("partition.npz")),
    )
    if run.index["provenance"].get("data") != setup.dataset.fingerprint():
        raise FldiagError(
            f"the data set {setup.dataset.name!r} found here is not the one {run.path} was trained on",
            "point to the same data with --root",
        )
    return setup


def weights(run: Run, setup: Setup, round: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The stored global model of a round, by default of the last."""
    state, network = run.checkpoint(round).state, setup.network
    return network.layout.row(state).to(setup.device, setup.dtype), {
        n: state[n].to(setup.device) for n in network.buffers
    }
