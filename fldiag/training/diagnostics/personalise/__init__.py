"""What the clients gain from a model of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BeforeValidator, Field

from fldiag.choices import Data, Device, Download, Executor, Model, Root
from fldiag.errors import FldiagError
from fldiag.registry import Progress, diagnostic
from fldiag.results.kept_units import KeptUnits
from fldiag.results.provenance import digest
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import PERSONAL
from fldiag.runs.run import Run
from fldiag.training.diagnostics.personalise import picture

SUMMARY = {
    "epochs": "fine-tuning epochs",
    "clients": "clients",
    "mean": "personal accuracy",
    "std": "± (over clients)",
    "lowest": "lowest",
    "highest": "highest",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """One row for each run and number of epochs, none where the table holds no personal accuracy; and what voted."""
    several = frame["run"].nunique() > 1
    rows = []
    for (run, e), part in only(frame, metric=(PERSONAL, f"{PERSONAL}_std")).groupby(
        ["run", "index"], sort=False
    ):
        each = only(part, scope="client")["value"].dropna()
        if len(each):
            rows.append(
                {
                    **({"run": run} if several else {}),
                    "epochs": int(e),
                    "clients": len(each),
                    "mean": number(part, PERSONAL, scope="global"),
                    "std": number(part, f"{PERSONAL}_std", scope="global"),
                    "lowest": float(each.min()),
                    "highest": float(each.max()),
                }
            )
    yield Small(rows, {**({"run": "run"} if several else {}), **SUMMARY})
    for text in frame["voters"].dropna().unique() if "voters" in frame else ():
        yield Say(f"voted: {text}")


def _listed(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, range)) else value


#: Whole numbers such as 0,1,5; in Python a sequence will do.
Numbers = Annotated[str | None, BeforeValidator(_listed)]


@diagnostic(
    "personalise",
    on="runs",
    draw=picture.draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --epochs 0,1,5",
)
def personalise(
    runs: Sequence[Run],
    progress: Progress | None = None,
    *,
    epochs: Annotated[
        Numbers,
        Field(
            description="Epochs of fine-tuning, such as 0,1,5 (the default, unless the "
            "run's method has a fine-tuning plan)."
        ),
    ] = None,
    lr: Annotated[
        Literal["decayed", "initial"] | None,
        Field(description="Learning rate: decayed (that after the last round) or initial."),
    ] = None,
    knn: Annotated[
        bool,
        Field(
            description="Combine the model's prediction with a vote of the client's 5 nearest "
            "training examples (kNN-Per)."
        ),
    ] = False,
    clients: Annotated[Numbers, Field(description="Use only these clients, such as 0,3,7.")] = None,
    test: Annotated[
        Literal["test", "own"],
        Field(
            description="Test examples: test (in the client's class mixture) "
            "or own (all examples of its classes)."
        ),
    ] = "test",
    model: Model = None,
    data: Data = None,
    root: Root = None,
    download: Download = False,
    device: Device = "auto",
    executor: Executor = "serial",
    seed: Annotated[int | None, Field(description="Random seed.")] = None,
    store: Any = None,
) -> pd.DataFrame:
    """Fine-tune the final model for each client and test it on the client's own class mixture: mean and std of the accuracy.

    From the last checkpoint of finished runs. Each of ``clients`` (default: all) starts from the global model (with
    ``local_only``: from its own), trains e epochs by the run's local loop with plain cross entropy (or as the run's method says)
    and fresh momentum, for each e of ``epochs``, and is tested on ``test`` examples of its own mixture of classes. The first
    epochs of a longer training are those of a shorter one. What is not given is the method's own plan; the default is 0, 1 and 5
    epochs at the decayed lr. ``seed``: of minibatches and stores (default: the run's). ``store`` as for ``landscape``, of tested
    clients.

    Rows, with ``index`` = e: ``personal_accuracy`` of each client (binomial stderr; ``low`` and ``high``: Wilson's 95 %
    interval) and, with scope global, its mean over the clients (stderr over clients), ``personal_accuracy_std`` (the clients'
    standard deviation, divisor m), each client counting once. Clients without a test example have no value and do not enter.

    Raises FldiagError for unfinished runs, data without classes, wrong epochs or clients, and neighbours without features.
    """
    from fldiag.method import Neighbours
    from fldiag.training.personalise import of_run
    from fldiag.training.setup import setup_of

    lengths, ids = _numbers(epochs, "epochs", "0,1,5"), _numbers(clients, "clients", "0,3,7")
    unit_store = KeptUnits(
        store,
        lambda: digest(
            "personalise",
            [run.index for run in runs],
            lengths,
            ids,
            lr,
            knn,
            test,
            seed,
            model,
            data,
            str(device),
        ),
    )
    return pd.concat(
        [
            of_run(
                run,
                setup_of(run, device=device, root=root, download=download, model=model, data=data),
                epochs=lengths,
                clients=ids,
                lr=lr,
                neighbours=Neighbours() if knn else None,
                test=test,
                seed=seed,
                executor=executor,
                progress=progress,
                store=unit_store,
            )
            for run in runs
        ],
        ignore_index=True,
    )


def _numbers(text: str | None, option: str, example: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FldiagError(
            f"--{option} {text!r} is not a list of whole numbers",
            f"write for example --{option} {example}",
            usage=True,
        ) from None
