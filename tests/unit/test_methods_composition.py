"""What parts need of one another: declared, checked when a method is built, and nothing else is read."""

import pytest
import torch
from helpers import config, federation, label, needs, play, variants, world

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.method import Method, Part
from fldiag.parts.control import ControlVariates
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


class Watched(dict):
    """A dict that tells whoever is at work which names were read and which were written."""

    def __init__(self, content, desk):
        super().__init__(content)
        self.desk = desk

    def __getitem__(self, name):
        self.desk.read(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.desk.read(name)
        return super().get(name, default)

    def __setitem__(self, name, value):
        self.desk.wrote(name)
        super().__setitem__(name, value)


def inside(parts):
    """All parts, also those that others hold."""
    for part in parts:
        yield part
        yield from inside(value for value in vars(part).values() if isinstance(value, Part))


class Desk:
    """Which part is at work, and what it read that is neither its own nor declared."""

    SLOTS = ("begin", "batch", "loss", "perturb", "correct", "finish", "server", "refine")

    def __init__(self, made):
        self.part, self.own, self.strange = None, {}, set()
        start = made.setup.initial()
        for part in inside(made.setup.method):
            self.own[part] = (
                provided(part) | set(part.client_init(start)) | set(part.server_init(start))
            )
            for slot in self.SLOTS:
                setattr(part, slot, self.watched(part, getattr(part, slot)))

    def watched(self, part, slot):
        def call(subject, *more):
            before, self.part = self.part, part
            self.cover(getattr(subject, "local", subject))
            try:
                return slot(subject, *more)
            finally:
                self.part = before

        return call

    def cover(self, subject):
        for name in ("state", "sent", "uploads", "memo"):
            held = getattr(subject, name, None)
            if type(held) is dict:
                setattr(subject, name, Watched(held, self))

    def read(self, name):
        if not isinstance(
            name, str
        ):  # a computation that whoever comes first does for all, kept under itself
            return
        if self.part is not None and name not in self.own[self.part] | set(self.part.needs):
            self.strange.add((type(self.part).__name__, name))

    def wrote(self, name):
        if self.part is not None:
            self.own[self.part].add(name)


@VARIANTS
@pytest.mark.slow
def test_no_part_reads_of_another_what_it_does_not_declare(case):
    built(case)
    name, options = case
    made = federation(config(name, options, **needs(name)), world(name))
    desk = Desk(made)
    play(made, 2)
    assert not desk.strange


def test_an_undeclared_reading_is_seen():
    class Spy(Part):
        def correct(self, step, g):
            return g + 0 * step.local.sent["c"]

    made = federation(config("scaffold"), world("scaffold"))
    made.setup.method = Method(ControlVariates(1.0), Spy())
    desk = Desk(made)
    play(made)
    assert desk.strange == {("Spy", "c")}
    assert torch.isfinite(made.w).all()
