"""Options that several diagnostics have, and what they can be; known without importing PyTorch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SkipValidation

#: The Hessian, or the Gauss-Newton matrix.
Matrix = Literal["hessian", "ggn"]
#: Which end of a spectrum; magnitude: both.
Which = Literal["largest", "smallest", "magnitude"]
#: Whether models are evaluated side by side.
Stack = Literal["auto", "on", "off"]

#: The proximal losses that need nothing but the received model.
Proximal = Literal["kl", "l2"]
#: Lambda: by how far each entry has moved, or 1 everywhere.
Strength = Literal["adaptive", "fixed"]
#: Over what Lambda is normalised; ``dim0`` is the released code's reading.
Rule = Literal["layer", "tensor", "dim0"]

# of a trace or a diagonal
Per = Annotated[Literal["layer", "tensor"], Field(description="Parts: layer or tensor.")]
Estimate = Annotated[Literal["auto", "exact", "hutchinson"], Field(description="auto, exact or hutchinson.")]
Rtol = Annotated[float, Field(gt=0, lt=1, description="Relative standard error allowed in an estimate.")]
Products = Annotated[int, Field(ge=2, description="Hessian-vector products allowed for an estimate.")]
Deflated = Annotated[int, Field(ge=0, description="Of these, products that span what is counted exactly.")]
#: Which examples a client is tested on: test examples in its class mixture, all of its classes, or its own training examples.
ClientSlice = Literal["test", "own", "train"]
#: Bins of a calibration error (Guo et al. 2017), and examples of a client below which nothing is said of it.
BINS, FEWEST = 15, 5

# of diagnostics that are asked of whole runs, and open these themselves
Model = Annotated[str | None, Field(description="The run's model, where that is a user's own code.")]
Data = Annotated[str | None, Field(description="The run's data, where they are a user's own code.")]
Root = Annotated[str | None, Field(description="Folder that holds the data (default $FLDIAG_DATA).")]
Download = Annotated[bool, Field(description="Fetch a missing public data set.")]
Device = Annotated[str, Field(description="auto, cpu, cuda, cuda:N or mps.")]
Executor = Annotated[str, SkipValidation(), Field(description="Where work runs: serial, processes[:N] or dask[:ADDRESS].")]
