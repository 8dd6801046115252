"""Scalars as an offline run of Weights & Biases."""

from __future__ import annotations

from pathlib import Path

from fldiag.export.scalars import Scalars, environment, need


def export(scalars: Scalars, out: Path, project: str = "fldiag") -> Path:
    """Write ``out/wandb/offline-run-…`` and return that folder. Nothing is sent: ``wandb sync FOLDER`` does that when you
    want it. Raises FldiagError without wandb."""
    with environment(
        WANDB_ERROR_REPORTING="false"
    ):  # it would look for its error tracker also when offline
        wandb = need("wandb", "wandb")
        settings = wandb.Settings(
            mode="offline",
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        out.mkdir(parents=True, exist_ok=True)
        alone = (
            wandb.setup().most_recent_active_run is None
        )  # wandb.run does not know those of reinit="create_new"
        with wandb.init(
            project=project,
            name=scalars.name,
            dir=str(out),
            config=scalars.config,
            settings=settings,
            reinit="create_new",
        ) as run:
            for step, numbers in scalars.by_step():
                run.log(numbers, step=step)
            folder = Path(run.settings.sync_dir)
        if alone:  # its service may still be writing the file; this waits for it, and would end the caller's own runs
            wandb.teardown()
    return folder
