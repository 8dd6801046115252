"""What parts need of one another: declared, checked when a method is built, and nothing else is read."""

import pytest
from helpers import label, variants

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.method import Method, Part
from fldiag.parts.momentum import ClientMomentum, GlobalPerturbation, GlobalUpdate, Register
from fldiag.parts.server import MeanGradientCorrection, NormalisedMean

VARIANTS = pytest.mark.parametrize("case", variants(), ids=label)


def built(case):
    name, options = case
    entry = registry.method.get(name)
    return entry.build(**entry.validate(options))


def provided(part):
    return {*part.sent, *part.uploaded, *part.provides}


@VARIANTS
def test_a_registered_method_without_a_part_that_another_needs_is_refused(case):
    method = built(case)
    for part in method:
        rest = [p for p in method if p is not part]
        lost = {name for p in rest for name in p.needs} - {
            name for p in rest for name in provided(p)
        }
        if lost:
            with pytest.raises(
                FldiagError, match=r"needs .*, which no other part of the method sends"
            ):
                Method(*rest)
        else:
            Method(*rest)


@pytest.mark.parametrize(
    ("part", "partner", "name"),
    [
        (lambda: MeanGradientCorrection(True), NormalisedMean(), "a_k"),
        (lambda: ClientMomentum(0.1), GlobalUpdate("plain", True), "delta"),
    ],
)
def test_the_error_names_the_part_and_what_it_lacks(part, partner, name):
    with pytest.raises(FldiagError) as caught:
        Method(part())
    assert caught.value.what == (
        f"{type(part()).__name__} needs {name!r}, which no other part of the method sends, uploads or "
        "keeps for it"
    )
    assert f"a part that has {name!r} in sent" in caught.value.remedy
    assert len(Method(part(), partner).parts) == len(Method(partner, part()).parts) == 2


def test_what_is_needed_may_depend_on_the_options():
    update = GlobalUpdate("plain", False)
    Method(GlobalPerturbation(0.1, 1.0, "global"), update)
    with pytest.raises(FldiagError, match="needs 'register'"):
        Method(GlobalPerturbation(0.1, 1.0, "fusion"), update)
    Method(GlobalPerturbation(0.1, 1.0, "fusion"), Register(), update)


def test_a_part_cannot_be_its_own_partner():
    class Narcissus(Part):
        sent, needs = ("echo_of_narcissus",), ("echo_of_narcissus",)

    with pytest.raises(FldiagError, match="no other part"):
        Method(Narcissus())
