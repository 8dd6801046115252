"""The verbs ``figures`` and ``toy``: what is typed. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fldiag.cli.options import (
    Debug,
    Device,
    Download,
    Executor,
    Format,
    Json,
    Out,
    Seed,
    Shard,
    Width,
)
from fldiag.console import Console, errors
from fldiag.device import device_of
from fldiag.errors import FldiagError

toy = typer.Typer(
    no_args_is_help=True, help="Two toy problems whose results can be checked by hand."
)


def figures(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Figures, such as fedsol/fig6, or fedsol for a whole paper "
            "(fldiag list figures). Default: all."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke (digits, minutes), small (hours), real (language "
            "tasks, hours), paper (the full protocol) or paper-bf16 (the "
            "same, but trained in bf16)."
        ),
    ] = "smoke",
    out: Out = None,
    runs: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: checkpoints/figures.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which finished runs are also kept without their weights "
            "(some kB each), and read where --runs lacks them."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Short for --executor processes:N.")] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            help="Where runs, or a single run's clients, are trained: serial, "
            "processes[:N] or dask[:ADDRESS]. Default: processes."
        ),
    ] = None,
    shard: Shard = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forecast runs, hours and disk; train nothing.")
    ] = False,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Train nothing; draw from the existing runs.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only runs with KEY=VALUE[,VALUE], such as "
            "method.name=fedavg,fedsol (keys as in train --set; "
            "several keys must all hold)."
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Only rebuild the ledger from existing results.")
    ] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Only redraw the pictures from existing csv files.")
    ] = False,
    width: Width = None,
    format: Format = None,
    download: Download = False,
    json: Json = False,
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Reproduce the papers' figures and tables, and the ledger of reported and measured numbers.

    Example: fldiag figures fedsol/fig6 --scale smoke
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag_papers import figures as verb

        with sheet.use_sheet(width, format):
            verb.figures(
                Console(json),
                ids or [],
                scale,
                out,
                runs,
                records,
                _executor(executor, jobs),
                shard,
                dry_run,
                as_is,
                only or [],
                ledger,
                redraw,
                download,
                device_of(device),
                debug,
            )


def _executor(executor: str | None, jobs: int | None) -> str:
    if executor and jobs is not None:
        raise FldiagError(
            "--jobs and --executor both say where runs are trained", "give one of them", usage=True
        )
    if jobs is not None and jobs < 1:
        raise FldiagError(f"jobs = {jobs}", "give --jobs 1 or more", usage=True)
    return executor or {None: "processes", 1: "serial"}.get(jobs, f"processes:{jobs}")


@toy.command()
def plane(
    rho: Annotated[float, typer.Option(help="FedSOL's perturbation radius.")] = 1.5,
    beta: Annotated[float, typer.Option(help="FedProx's weight.")] = 1.0,
    a: Annotated[
        list[float] | None, typer.Option(help="Curvature along x; give it once per client.")
    ] = None,
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """FedSOL and FedProx in the plane: where the clients end up, drawn and compared with the closed forms.

    Example: fldiag toy plane --rho 0.5
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag_papers import toys_verb as verb
        from fldiag_papers.toys.plane import CURVATURES

        with sheet.use_sheet(width, format):
            verb.plane(Console(json), rho, beta, tuple(a or CURVATURES), out)


@toy.command()
def iris(
    split: Annotated[
        str | None,
        typer.Option(
            help="Classes per client: one, two, mixed (two and a tenth of the third) or "
            "dominant (80/10/10). Default: one."
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of clients and distillation. Default: 0.01.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not standardise the features before the PCA.")
    ] = False,
    full_batch: Annotated[
        bool,
        typer.Option("--full-batch", help="Use full batches instead of minibatches of 5 flowers."),
    ] = False,
    train_test: Annotated[
        bool,
        typer.Option(
            "--train-test",
            help="Train on 80 % and test on the other 20 %. Default: "
            "train and test on all examples.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of 5 local epochs.")] = 20,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 5,
    methods: Annotated[
        str, typer.Option(help="Methods to compare, separated by commas.")
    ] = "fedavg,feddf,fedproj",
    variants: Annotated[
        bool,
        typer.Option(
            "--variants",
            help="Compare several protocols, one of them with the paper's "
            "learning rate, in a table.",
        ),
    ] = False,
    executor: Executor = "serial",
    seed: Seed = None,
    out: Out = None,
    width: Width = None,
    format: Format = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Decision regions on Iris: what three clients forget under FedAvg, FedDF and FedProj, compared with the paper's numbers.

    Example: fldiag toy iris --split two --seeds 3
    """
    with errors(debug):
        from fldiag.plotting import sheet
        from fldiag_papers import toys_verb as verb
        from fldiag_papers.toys.iris import Protocol

        flags = [
            flag
            for flag, value in (
                ("--split", split),
                ("--lr", lr),
                ("--raw", raw or None),
                ("--full-batch", full_batch or None),
            )
            if value is not None
        ]
        if variants and flags:
            raise FldiagError(
                f"--variants has its own protocols, so {', '.join(flags)} would be ignored",
                "leave out one or the other",
                usage=True,
            )
        protocol = (
            None
            if variants
            else Protocol(
                split or "one",
                0.01 if lr is None else lr,
                None if full_batch else 5,
                raw,
                train_test,
                rounds,
            )
        )
        names = [name.strip() for name in methods.split(",") if name.strip()]
        with sheet.use_sheet(width, format):
            verb.iris(
                Console(json), protocol, names, seeds, seed or 0, rounds, train_test, executor, out
            )
