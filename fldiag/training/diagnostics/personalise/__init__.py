"""What the clients gain from a model of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BeforeValidator, Field, SkipValidation

from fldiag.checkpoint.run import Run
from fldiag.errors import FldiagError
from fldiag.registry import Progress, diagnostic
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import PERSONAL
from fldiag.training.diagnostics.personalise import picture
from fldiag.training.diagnostics.personalise.section import section

SUMMARY = {"epochs": "fine-tuning epochs", "clients": "clients", "mean": "personal accuracy", "std": "± (over clients)",
           "lowest": "lowest", "highest": "highest"}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """One row for each run and number of epochs, none where the table holds no personal accuracy; and what voted."""
    several = frame["run"].nunique() > 1
    rows = []
    for (run, e), part in only(frame, metric=(PERSONAL, f"{PERSONAL}_std")).groupby(["run", "index"], sort=False):
        each = only(part, scope="client")["value"].dropna()
        if len(each):
            rows.append({**({"run": run} if several else {}), "epochs": int(e), "clients": len(each),
                         "mean": number(part, PERSONAL, scope="global"),
                         "std": number(part, f"{PERSONAL}_std", scope="global"), "lowest": float(each.min()),
                         "highest": float(each.max())})
    yield Small(rows, {**({"run": "run"} if several else {}), **SUMMARY})
    for text in frame["voters"].dropna().unique() if "voters" in frame else ():
        yield Say(f"voted: {text}")


def _listed(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, range)) else value


#: Whole numbers such as 0,1,5; in Python a sequence will do.
Numbers = Annotated[str | None, BeforeValidator(_listed)]


@diagnostic("personalise", on="runs", draw=picture.draw, summary=summary, section=section, order=70,
            example="checkpoints/digits-fedavg-s0-1a2b3c4d --epochs 0,1,5")
def personalise(runs: Sequence[Run], progress: Progress | None = None, *,
                epochs: Annotated[Numbers, Field(description="Epochs of fine-tuning, such as 0,1,5 (the default, if the run's "
                                                             "method has no plan of its own).")] = None,
                lr: Annotated[Literal["decayed", "initial"] | None, Field(
                    description="decayed (lr after the last round) or initial.")] = None,
                knn: Annotated[bool, Field(description="Let the 5 nearest of the client's own training examples vote "
                                                        "with the model.")] = False,
                clients: Annotated[Numbers, Field(description="Only these clients, such as 0,3,7.")] = None,
                test: Annotated[str, Field(description="Tested on test (the client's class mixture) or own (all its "
                                                       "classes).")] = "test",
                model: Annotated[str | None, Field(description="Model of a plain state_dict: NAME or pkg.mod:factory.")] = None,
                data: Annotated[str | None, Field(description="Its data: NAME, npz:PATH, csv:PATH or pkg.mod:loader.")] = None,
                root: Annotated[str | None, Field(description="Folder that holds the data (default $FLDIAG_DATA).")] = None,
                download: Annotated[bool, Field(description="Fetch a missing public data set.")] = False,
                device: Annotated[str, Field(description="auto, cpu, cuda or mps.")] = "auto",
                executor: Annotated[str, SkipValidation(), Field(
                    description="Where work runs: serial, processes[:N] or dask[:ADDRESS].")] = "serial",
                seed: Annotated[int | None, Field(description="Random seed.")] = None) -> pd.DataFrame:
    """Each client's own model, fine-tuned from the final one: accuracy on its own class mixture, mean and std.

    Rows, options and errors are those of ``fldiag.training.personalise.personalise``, for every run.
    """
    from fldiag.method import Neighbours
    from fldiag.training import personalise as library

    lengths, ids = _numbers(epochs, "epochs", "0,1,5"), _numbers(clients, "clients", "0,3,7")
    return pd.concat([library.personalise(
        run, lr=lr, neighbours=Neighbours() if knn else None, test=test, model=model, data=data, root=root, download=download,
        device=device, seed=seed, executor=executor, progress=progress, epochs=lengths,
        clients=ids) for run in runs], ignore_index=True)


def _numbers(text: str | None, option: str, example: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FldiagError(f"--{option} {text!r} is not a list of whole numbers", f"write for example --{option} {example}",
                          usage=True) from None
