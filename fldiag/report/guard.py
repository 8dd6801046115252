"""One table that a section cannot use costs that table, and never the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fldiag.errors import FldiagError
from fldiag.plotting.collected import Collected, Member
from fldiag.plotting.sections import Section


def guarded(part: Callable[[Collected], Section], found: Collected) -> Section:
    """The section that ``part`` lays out.

    Where it fails, each table is tried alone; those with which it fails are left out, and the section says so. Tables without a
    checksum may have been edited by anybody, so nothing is certain about their content.

    Args:
        part: Lays out a section of the collection.
        found: The collection; it is not changed.

    Raises:
        Exception: What ``part`` raises without any table at all, or with tables of which none fails alone.
    """
    try:
        return part(found)
    except Exception:
        unfit = {
            (m.place, kind): error
            for m in found.members
            for kind in m.tables
            if (error := _failure(part, found, m, kind))
        }
        if not unfit:
            raise
        fit = [
            replace(m, tables={k: s for k, s in m.tables.items() if (m.place, k) not in unfit})
            for m in found.members
        ]
        section = part(replace(found, members=fit))
        reasons = {
            found.members[place].tables[kind].name: why for (place, kind), why in unfit.items()
        }
        section.notes += [
            f"{name} is not shown here: its numbers cannot be drawn ({why})."
            for name, why in reasons.items()
        ]
        return section


def _failure(
    part: Callable[[Collected], Section], found: Collected, member: Member, kind: str
) -> str:
    """Why the section fails with this table alone; empty when it does not."""
    alone = [
        replace(m, tables={kind: m.tables[kind]} if m is member else {}) for m in found.members
    ]
    try:
        part(replace(found, members=alone))
    except Exception as error:
        return (
            str(error.what)
            if isinstance(error, FldiagError)
            else f"{type(error).__name__}: {error}"
        )
    return ""
