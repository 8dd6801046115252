"""Every verb: help with an example; its last line is the path of what it wrote; ``--json`` prints one object."""

import json
import re
from pathlib import Path

import pytest
import torch
from reference import build, typed

from fldiag import registry


def verbs(*group):
    return re.findall(r"^│ ([a-z][\w-]*) ", typed(*group, "--help").out, re.MULTILINE)


VERBS = verbs()


QUICK = "--set rounds=1 --set model.name=mlp --set clients.total=4 --set clients.per_round=2"
#: What a verb is given that does not take a run alone.
GIVEN = {
    "train": f"digits {QUICK} --out OUT-TIME",
    "sweep": f"digits {QUICK} --over seed=0,1",
    "list": "methods",
    "explain": "fedavg",
    "diagnose": "spectrum RUN --set k=1",
    "partition": "digits --format png",
    "check": "RUN OTHER",
    "diff": "RUN OTHER",
    "report": "RUN OTHER",
    "runs": "RUNS",
    "prune": "RUN",
    "convert": "received OUT-TIME --pattern r{round}_c{client}.pt --model mlp --data DATA",
    "export": "RUN --to tensorboard",
}
#: ``make demo``, the papers' own tests and those of every diagnostic run these.
ELSEWHERE = {"demo", "figures", "toy", *registry.diagnostic.names()}


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb):
    texts = [typed(verb, "--help").out]
    if "COMMAND" in texts[0]:
        texts = [typed(verb, command, "--help").out for command in verbs(verb)]
    assert texts and all(f"Example: fldiag {verb}" in text for text in texts)


@pytest.mark.parametrize("verb", sorted({*VERBS} - ELSEWHERE))
def test_last_line_is_a_path_and_json_is_one_object(verb, trained, toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "received").mkdir()
    for r, c in ((1, 0), (1, 1), (2, 0), (2, 1)):
        torch.manual_seed(r + 2 * c)
        torch.save(build("mlp", (4,), 3).state_dict(), tmp_path / f"received/r{r}_c{c}.pt")
    words = GIVEN.get(verb, "RUN")
    if "--out" in typed(verb, "--help").out and "OUT" not in words:
        words += " --out OUT"
    places = {"RUNS": trained[0].parent, "RUN": trained[0], "OTHER": trained[1]}
    places |= {"DATA": f"npz:{toy.folder / 'toy.npz'}"}
    for name, path in places.items():
        words = re.sub(rf"\b{name}\b", str(path), words)
    plain = typed(verb, *words.replace("TIME", "1").split())
    machine = typed(verb, *words.replace("TIME", "2").split(), "--json")
    assert (plain.code, machine.code) == (0, 0), plain.err + machine.err
    answer = json.loads(machine.out)
    assert isinstance(answer, dict) and plain.out.strip()
    if paths := answer.get("paths"):
        last = Path(plain.out.strip().splitlines()[-1])
        assert last.exists() and last.suffix == Path(paths[-1]).suffix
    else:
        assert "--out" not in words
