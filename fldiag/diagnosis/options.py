"""The options of what is diagnosed, spelled once: for the command line, ``diagnose`` and the documentation."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Field

from fldiag.errors import FldiagError
from fldiag.execution import check_executor
from fldiag.sections import read_normalisation


def size(memory: str | int) -> int:
    """A number of bytes, of such as 500M, 2GiB or 1500000000. Raises FldiagError for anything else, and for less than a thousand
    where the unit may have been forgotten.

    >>> size("500M"), size("2GiB")
    (524288000, 2147483648)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]?)i?b?", str(memory).strip().lower())
    count = int(float(match[1]) * 1024 ** " kmg".index(match[2] or " ")) if match else 0
    if count < (1024 if isinstance(memory, str) else 1):
        what = f"memory = {memory!r} is {f'{count:,} bytes' if match else 'no size'}"
        raise FldiagError(what, "give such as 500M or 2G, or at least 1k", usage=True)
    return count


def read_names(text: str | Sequence[str]) -> list[str]:
    """Names of text with commas, or of a list. Raises FldiagError for an empty one, and for one twice.

    >>> read_names("FedAvg, Ours")
    ['FedAvg', 'Ours']
    """
    names = [name.strip() for name in (text.split(",") if isinstance(text, str) else text)]
    if not all(names) or len(set(names)) < len(names):
        what = f"names = {','.join(names)!r} has an empty name, or one name twice"
        raise FldiagError(what, "give each target a name of its own", usage=True)
    return names


class SubjectOptions(pydantic.BaseModel):
    """What every diagnostic takes, also one of runs, which opens these itself."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    executor: Annotated[Any, AfterValidator(check_executor)] = Field(
        "serial",
        description="Where work runs: serial, processes[:N] or dask[:ADDRESS].",
    )
    names: Annotated[Any, AfterValidator(read_names)] = Field(
        None,
        description="Names of the targets in tables and pictures, in their order, such as FedAvg,Ours.",
    )


class OpenedOptions(SubjectOptions):
    """Of weights and of the rounds of a run: what both are evaluated on, and how."""

    samples: int | None = Field(
        None,
        ge=1,
        description="Maximum number of examples; class proportions are kept.",
    )
    precision: Literal["fp32", "fp64"] = Field(
        "fp32", description="Precision of the computation: fp32 or fp64."
    )
    memory: Annotated[Any, AfterValidator(size)] = Field(
        None,
        description="Memory limit for batches, graphs and bases of vectors, such as 500M (default 2G); "
        "model, data and single vectors are not counted.",
    )
    model: Any = Field(None, description="Model of a plain state_dict: NAME or pkg.mod:factory.")
    data: Any = Field(
        None,
        description="Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader (a function that returns a data "
        "set's four arrays, or (x, y), a dict, a Dataset or a DataLoader).",
    )
    normalise: Annotated[Any, AfterValidator(read_normalisation)] = Field(
        None,
        description="How data given with --data are normalised: none (as stored), unit (pixels / 255), "
        "standard (subtract the mean, divide by the standard deviation of the training split), or "
        "with these given: MEAN/DEVIATION such as 0.1307/0.3081 or "
        "0.49,0.48,0.45/0.25,0.24,0.26 (of pixels / 255). Default: unit for uint8 pixels, "
        "else none.",
    )
    root: Any = Field(None, description="Folder that holds the data (default $FLDIAG_DATA).")
    download: bool = Field(False, description="Download a missing public data set.")
    device: Any = Field("auto", description="Device: auto, cpu, cuda, cuda:N or mps.")


class ProblemOptions(OpenedOptions):
    """Of the loss around stored weights (``fldiag.runs.open_problem``)."""

    slice: str = Field(
        "train",
        description="Examples to use: train, test, client:7, client:7/test (test examples in its class "
        "mixture) or client:7/own (all of its classes).",
    )
    client: int | None = Field(
        None,
        ge=0,
        description="Use the trained weights of this client instead of the global ones.",
    )
    key: str | None = Field(
        None,
        description="Set of weights to use of a file that holds several, such as model_ema.",
    )
    loss: Any = Field(
        None,
        description="Loss: cross_entropy, half_squared_error, mse, multi_label, own (the model's own "
        "loss) or pkg.mod:function of (outputs, y). Default: chosen by the type of the labels; own if "
        "batches are dicts.",
    )
    trainable: bool = Field(
        False,
        description="Treat only parameters with requires_grad as weights; frozen parameters are "
        "constants.",
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="Add the term L/2 |w|^2 to the loss, with this L (default: 0).",
    )
    round: int | None = Field(
        None,
        ge=0,
        description="For a run: use the checkpoint of this round instead of the last one.",
    )


class HistoryOptions(OpenedOptions):
    """Of the stored rounds of a run (``History``)."""

    rounds: Any = Field(None, description="Rounds to use, such as 5, 1,5,20-30, every:10 or last.")


#: The options of a diagnostic's subject, by what the diagnostic is on.
BY_SUBJECT: dict[str, type[SubjectOptions]] = {
    "problem": ProblemOptions,
    "checkpoints": ProblemOptions,
    "run": HistoryOptions,
    "clients": HistoryOptions,
    "runs": SubjectOptions,
}


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file can hold: not objects. The executor is left out, for it changes nothing."""
    texts: dict[str, Any] = {}
    for name, value in options.items():
        with contextlib.suppress(TypeError, ValueError):
            if name != "executor":
                texts[name] = json.loads(json.dumps(value))
    return texts
