"""All checks in the order in which they are shown. The command line describes them without PyTorch."""

from __future__ import annotations

from inspect import getdoc

from fldiag.diagnostics.doctor.adapters import Factors
from fldiag.diagnostics.doctor.aggregation import Aggregate
from fldiag.diagnostics.doctor.buffers import Statistics, Values
from fldiag.diagnostics.doctor.clients import Copies, Inputs, Norms, Silent
from fldiag.diagnostics.doctor.continuity import Continuity
from fldiag.diagnostics.doctor.data import Leak, Parts, Twins
from fldiag.diagnostics.doctor.directions import UpdateDirections, Uploads
from fldiag.diagnostics.doctor.findings import Check
from fldiag.diagnostics.doctor.finite import Finite
from fldiag.diagnostics.doctor.head import Dead, Head
from fldiag.diagnostics.doctor.metrics import Chance, Means, Reported
from fldiag.diagnostics.doctor.own_data import OwnData
from fldiag.diagnostics.doctor.sampling import Sampling
from fldiag.diagnostics.doctor.seeds import Seeds
from fldiag.diagnostics.doctor.starts import Starts
from fldiag.diagnostics.doctor.trained_on_test import TestData

CHECKS: tuple[type[Check], ...] = (
    Finite,
    Aggregate,
    Continuity,
    Starts,
    Statistics,
    Values,
    Factors,
    Sampling,
    Silent,
    Copies,
    Norms,
    UpdateDirections,
    Uploads,
    OwnData,
    Inputs,
    TestData,
    Parts,
    Twins,
    Leak,
    Reported,
    Means,
    Chance,
    Head,
    Dead,
    Seeds,
)


def described() -> str:
    """Every check with its rule, for the help."""
    texts = ((getdoc(check) or "").replace("\n\n", "\n") for check in CHECKS)
    return "\n".join(
        f"- ``{check.name}``: {text}".replace("\n", "\n  ")
        for check, text in zip(CHECKS, texts, strict=True)
    )
