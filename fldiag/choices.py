"""Options that several diagnostics have, and what they can be; known without importing PyTorch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

#: The Hessian, or the Gauss-Newton matrix.
Matrix = Literal["hessian", "ggn"]
#: Which end of a spectrum; magnitude: both.
Which = Literal["largest", "smallest", "magnitude"]

#: The proximal losses that need nothing but the received model.
Proximal = Literal["kl", "l2"]
#: Lambda: by how far each entry has moved, or 1 everywhere.
Strength = Literal["adaptive", "fixed"]
#: Over what Lambda is normalised; ``dim0`` is the released code's reading.
Rule = Literal["layer", "tensor", "dim0"]

# of an estimated trace or diagonal
Rtol = Annotated[
    float, Field(gt=0, lt=1, description="Allowed relative standard error of an estimate.")
]
Products = Annotated[
    int, Field(ge=2, description="Maximum number of Hessian-vector products for an estimate.")
]
#: Which examples a client is tested on: test examples in its class mixture, all of its classes, or its own training examples.
ClientSlice = Literal["test", "own", "train"]
#: Bins of a calibration error (Guo et al. 2017), and examples of a client below which nothing is said of it.
BINS, FEWEST = 15, 5

# of diagnostics that are asked of whole runs, and open these themselves
Model = Annotated[
    str | None, Field(description="Model of the run, if it is your own code: pkg.mod:factory.")
]
Data = Annotated[
    str | None,
    Field(description="Data of the run, if they come from your own code: pkg.mod:factory."),
]
Root = Annotated[
    str | None, Field(description="Folder that holds the data (default $FLDIAG_DATA).")
]
Download = Annotated[bool, Field(description="Download a missing public data set.")]
Device = Annotated[str, Field(description="Device: auto, cpu, cuda, cuda:N or mps.")]
