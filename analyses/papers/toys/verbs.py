"""The verb ``toy``. Nothing heavy is imported before it runs."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fldiag.cli.console import Console, errors
from fldiag.cli.options import Debug, Executor, Format, Json, Out, Seed, Width
from fldiag.errors import FldiagError

#: Significant digits of the toys' tables: enough to check a closed form by hand.
TOY_DIGITS = 12

toy = typer.Typer(
    no_args_is_help=True,
    help="Two toy problems whose results can be checked by hand.",
    rich_help_panel="Papers",
)


@toy.command("plane")
def toy_plane(
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
        from fldiag.diagnosis import places
        from fldiag.plotting import sheet, style
        from fldiag.results import files
        from fldiag.results.provenance import provenance
        from fldiag.results.select import number

        from . import plane, plane_picture

        console, curvatures = Console(json), tuple(a or plane.CURVATURES)
        frame = plane.run(rho, beta, curvatures)
        geometry = plane.geometry(rho, beta, curvatures)
        path = places.prepare(out or places.FALLBACK) / f"toy-plane-rho{rho:g}-beta{beta:g}"
        tables = files.write_table(frame, path, {**provenance(), "geometry": geometry}, TOY_DIGITS)
        with sheet.use_sheet(width, format):
            pictures = style.write(plane_picture.draw(frame, geometry), path)
        rows = []
        for (method, client, curvature), part in frame.groupby(["method", "client", "a"]):
            row: dict[str, Any] = {"method": method, "client": int(client), "a": float(curvature)}
            for metric in ("end_point", "closed_form"):
                x, y = (number(part, metric, column=axis) for axis in ("x", "y"))
                if x is not None:
                    row[metric] = f"({x:.6f}, {y:.6f})"
            row |= {
                m: value for m in ("distance", "angle") if (value := number(part, m)) is not None
            }
            rows.append(row)
        console.table(
            rows,
            {
                "method": "method",
                "a": "a",
                "end_point": "end point",
                "closed_form": "closed form",
                "distance": "distance",
                "angle": "angle to w_g–w_l* (°)",
            },
        )
        if geometry["equilibrium"] is None:
            console.note(
                f"rho = {rho:g} is not below |w_l* - w_g| = {geometry['distance']:.4g}: FedSOL has no equilibrium "
                "and hovers around w_g"
            )
        console.done(*tables, *pictures)


@toy.command("iris")
def toy_iris(
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
        from fldiag.diagnosis import places
        from fldiag.plotting import sheet, style
        from fldiag.results import files
        from fldiag.results.provenance import digest, provenance

        from . import iris, iris_picture, iris_reported

        console = Console(json)
        flags = {
            "--split": split,
            "--lr": lr,
            "--raw": raw or None,
            "--full-batch": full_batch or None,
        }
        ignored = [flag for flag, value in flags.items() if value is not None]
        if variants and ignored:
            raise FldiagError(
                f"--variants has its own protocols, so {', '.join(ignored)} would be ignored",
                "leave out one or the other",
                usage=True,
            )
        if seeds < 1:
            raise FldiagError(
                f"seeds = {seeds} leaves nothing to train", "give --seeds 1 or more", usage=True
            )
        if variants:
            protocols = iris.variants(rounds=rounds, train_test=train_test)
        else:
            batch = None if full_batch else 5
            rate = 0.01 if lr is None else lr
            protocols = (iris.Protocol(split or "one", rate, batch, raw, train_test, rounds),)
        names = [name.strip() for name in methods.split(",") if name.strip()]
        first = seed or 0
        about: dict[str, Any] = {
            "protocols": [asdict(p) | {"name": p.name} for p in protocols],
            "methods": names,
            "seeds": list(range(first, first + seeds)),
        }
        label = "variants" if variants else protocols[0].name
        path = places.prepare(out or places.FALLBACK) / f"toy-iris-{label}-{digest(about)[:8]}"
        keep = path.with_name(f".{path.name}.parts")
        with console.progress("iris") as bar:
            frame = iris.run(
                protocols,
                names,
                about["seeds"],
                keep=keep,
                executor=executor,
                progress=bar,
                on_damage=console.note,
            )
        averages, seed_rows = iris_reported.summary(frame), iris_reported.per_seed(frame)
        about = {
            **provenance(seed=first),
            **about,
            "reported": iris_reported.REPORTED,
            "statements": iris_reported.statements(frame),
        }
        json_path, csv_path = files.write_table(frame, path, about, TOY_DIGITS)
        text = files.csv_text(averages, TOY_DIGITS)
        summary = files.write_text(files.beside(path, "-summary.csv"), text)
        with sheet.use_sheet(width, format):
            if variants:
                figure = iris_picture.protocols(seed_rows, iris_reported.REPORTED)
                pictures = style.write(figure, path)
            else:
                figure = iris_picture.measures(seed_rows, frame, iris_reported.REPORTED)
                pictures = style.write(figure, path.with_name(f"{path.name}-measures"))
                pictures += style.write(iris_picture.regions(frame), path)
        shutil.rmtree(keep, ignore_errors=True)
        if json:
            rows = averages.astype(object).where(averages.notna(), None)
            console.result["rows"] = rows.to_dict("records")
        else:
            console.table(*iris_reported.for_reading(averages))
        for sentence in about["statements"]:
            console.say(sentence)
        console.result["statements"] = about["statements"]
        if not variants and rate != iris_reported.REPORTED_LR:
            console.note(
                f"the paper's learning rate is {iris_reported.REPORTED_LR:g}: --lr {iris_reported.REPORTED_LR:g}, or "
                "--variants for other protocols beside this one"
            )
        console.done(json_path, summary, csv_path, *pictures)
