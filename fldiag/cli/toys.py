"""The toys."""

from __future__ import annotations

from typing import Annotated

import typer

from fldiag.cli.app import toy
from fldiag.cli.options import Debug, Executor, Format, Json, Out, Seed, Width
from fldiag.console import Console, errors


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
        from fldiag.verbs import toys as verb

        with sheet.asked(width, format):
            verb.plane(Console(json), rho, beta, tuple(a) if a else None, out)


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
        from fldiag.errors import FldiagError
        from fldiag.plotting import sheet
        from fldiag.toys.iris import Protocol
        from fldiag.verbs import toys as verb

        given = [
            flag
            for flag, value in (
                ("--split", split),
                ("--lr", lr),
                ("--raw", raw or None),
                ("--full-batch", full_batch or None),
            )
            if value is not None
        ]
        if variants and given:
            raise FldiagError(
                f"--variants has its own protocols, so {', '.join(given)} would be ignored",
                "leave out one or the other",
                usage=True,
            )
        chosen = (
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
        with sheet.asked(width, format):
            verb.iris(
                Console(json), chosen, names, seeds, seed or 0, rounds, train_test, executor, out
            )
