"""Diagnostics: what a set of weights does on a data slice, seen through a Problem; one diagnostic a file."""

from fldiag import registry
from fldiag.problem.problem import Problem

__all__ = ["Problem"]

registry.listing(__name__, registry.diagnostic)
