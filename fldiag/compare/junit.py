"""A check as JUnit XML, which every build server reads."""

from __future__ import annotations

from xml.etree import ElementTree

from fldiag.compare.compare import Checked
from fldiag.compare.wording import sentence
from fldiag.errors import printable


def junit(outcome: Checked, strict: bool = False) -> str:
    """A test case a condition: fail is a failure; undecided is skipped, or with ``strict`` a failure too; a number
    that could not be computed is an error."""
    cases = ElementTree.Element("testsuite", name="fldiag check")
    properties = ElementTree.SubElement(cases, "properties")
    for name, value in (
        ("question", outcome.question),
        *((f"note {i}", text) for i, text in enumerate(outcome.notes, start=1)),
    ):
        ElementTree.SubElement(properties, "property", name=name, value=value)
    counts = {"errors": 0, "failures": 0, "skipped": 0}
    who = " against ".join(filter(None, outcome.labels))
    for row in outcome.table.to_dict("records"):
        case = ElementTree.SubElement(cases, "testcase", classname=who, name=row["condition"])
        text = sentence(row)
        if row["verdict"] == "fail" or (strict and row["verdict"] == "undecided"):
            ElementTree.SubElement(case, "failure", type=row["verdict"], message=text)
            counts["failures"] += 1
        elif row["verdict"] == "error":
            ElementTree.SubElement(case, "error", type="error", message=f"{text}; {row['remedy']}")
            counts["errors"] += 1
        elif row["verdict"] == "undecided":
            ElementTree.SubElement(case, "skipped", message=text)
            counts["skipped"] += 1
        else:
            ElementTree.SubElement(case, "system-out").text = text
    for key, count in {"tests": len(outcome.table), **counts}.items():
        cases.set(key, str(count))
    suites = ElementTree.Element("testsuites")
    suites.append(cases)
    ElementTree.indent(suites)
    return printable(ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)) + "\n"
