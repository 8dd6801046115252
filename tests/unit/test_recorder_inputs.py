"""Recorded runs of models with several inputs: what diagnostics of whole runs see is what a model of one tensor would show."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

import fldiag
from fldiag import FldiagError, models
from fldiag.runs.in_memory import dataset_of, with_packed_inputs
from fldiag.runs.packed import Packed

N, T, D, V = 30, 5, 3, 9
torch.manual_seed(0)
TOKENS, MASK, NUMBERS = torch.randint(0, V, (N, T)), torch.rand(N, T) < 0.7, torch.randn(N, D)
LABELS = torch.arange(N) % 3
INPUTS = {"tokens": TOKENS, "more": {"mask": MASK, "numbers": NUMBERS}}
PARTS = [range(0, 14), range(14, N)]


class Named(nn.Module):
    """Takes a dict with another one in it, and returns a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(V, 4), nn.Linear(4 + D, 3)

    def logits(self, tokens, mask, numbers):
        return self.out(
            torch.tanh(torch.cat([(self.table(tokens) * mask[..., None]).mean(1), numbers], 1))
        )

    def forward(self, tokens, more, labels=None):
        return {"hidden": tokens, "logits": self.logits(tokens, more["mask"], more["numbers"])}


class Placed(Named):
    def forward(self, tokens, more):
        return self.logits(tokens, *more)


class Masked(Named):
    def forward(self, tokens, mask):
        return self.logits(tokens, mask, torch.zeros(len(tokens), D))


class Single(Named):
    """The same in one tensor of numbers."""

    def forward(self, x):
        return self.logits(x[:, :T].long(), x[:, T : 2 * T].bool(), x[:, 2 * T :])


class Rows(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return {
            "tokens": TOKENS[i],
            "more": {"mask": MASK[i], "numbers": NUMBERS[i]},
            "labels": LABELS[i],
        }


def moved(net, seed):
    rng = torch.Generator().manual_seed(seed)
    made = copy.deepcopy(net)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=rng))
    return made


def record(out, net, **given):
    with fldiag.Recorder(out, net, **given) as rec:
        for t in range(2):
            clients = {k: moved(net, 2 * t + k) for k in range(2)}
            rec.round(received=net, clients=clients, aggregated=clients[0])
    return out


def values(run, net, name, **options):
    table = fldiag.diagnose(fldiag.load(run, model=net), name, **options)
    assert not (table["metric"] == "missing").any() or "no test examples" in " ".join(
        table["note"].dropna()
    )
    return table["value"].astype(float)


GIVEN = {
    "a dict": (Named, {"data": (INPUTS, LABELS), "clients": PARTS}),
    "a tuple": (Placed, {"data": ((TOKENS, (MASK, NUMBERS)), LABELS), "clients": PARTS}),
    "a loader of dicts with labels": (Named, {"data": DataLoader(Rows(), 7), "clients": PARTS}),
    "clients' own": (
        Placed,
        {
            "clients": {
                k: ((TOKENS[p], (MASK[p], NUMBERS[p])), LABELS[p]) for k, p in enumerate(PARTS)
            }
        },
    ),
}


ASKED = {
    "forgetting": {},
    "drift": {},
    "matching": {"k": 1, "rtol": 0.5, "max_products": 20},
    "spectrum": {"k": 1},
    "fairness": {},
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Of a model of one tensor."""
    data = torch.cat([TOKENS, MASK, NUMBERS], 1), LABELS
    twin = record(tmp_path_factory.mktemp("one") / "run", Single(), data=data, clients=PARTS)
    return {
        name: values(twin, Single(), name, **options) for name, options in ASKED.items()
    }, fldiag.load(twin).metrics["value"]


@pytest.mark.parametrize("kind", GIVEN)
def test_diagnostics_of_a_run_are_those_of_one_tensor(kind, tmp_path, expected):
    """Asked of the folder alone, in which the examples lie."""
    make, given = GIVEN[kind]
    run = record(tmp_path / "run", make(), **given)
    for name in ASKED if kind == "a dict" else ("forgetting",):
        found = values(run, make(), name, **ASKED[name])
        assert len(found) and np.allclose(
            found, expected[0][name], rtol=1e-4, atol=1e-6, equal_nan=True
        ), name
    assert fldiag.load(run).metrics["value"].tolist() == pytest.approx(
        expected[1].tolist(), rel=1e-6
    )


def picked(out, y):
    return nn.functional.cross_entropy(out["logits"], y)


def test_models_that_read_rows_travel_and_leave_the_users_alone():
    net, dataset = Named(), dataset_of((INPUTS, LABELS))
    made = pickle.loads(pickle.dumps(with_packed_inputs(net, dataset)))
    expected = net(**INPUTS)["logits"]
    assert torch.equal(made(dataset.train_x), expected) and list(made.state_dict()) == list(
        net.state_dict()
    )
    assert not net._forward_pre_hooks and torch.equal(
        made.double()(dataset.train_x).float(),
        net.double()(TOKENS, {"mask": MASK, "numbers": NUMBERS.double()})["logits"].float(),
    )


def test_rows_lose_nothing():
    inputs = {
        "a": torch.tensor([[0.0, -0.0], [float("nan"), 3e-45], [float("-inf"), 1 / 3]]),
        "b": (
            torch.tensor([2**62, -1, -(2**63)]),
            {"c": torch.tensor([[[True]], [[False]], [[True]]])},
        ),
        "d": torch.tensor([[255], [0], [7]], dtype=torch.uint8),
    }
    packed = Packed.of(inputs)
    rows = packed.rows(inputs)
    again = Packed.read(packed.text(), rows.shape[1]).inputs(rows, torch.float32)
    assert again["a"].view(torch.int32).equal(inputs["a"].view(torch.int32)) and again["b"][
        0
    ].equal(inputs["b"][0])
    assert (
        again["b"][1]["c"].equal(inputs["b"][1]["c"])
        and again["d"].equal(inputs["d"])
        and again["d"].dtype == torch.uint8
    )
    inside = '[[["a"], [2], "int64"], [["a", "b"], [3], "int64"]]'  # a tensor within another
    deep = "[[[" + ", ".join(['"a"'] * 5000) + '], [5], "int64"]]'
    for wrong in (
        '[[["a"], [9], "float32"]]',
        '[[["a"], [2], "object"]]',
        "[1]",
        "{",
        '[[[["x"]], [5], "bool"]]',
        inside,
        deep,
    ):
        with pytest.raises(FldiagError, match="does not describe rows of 5 numbers"):
            Packed.read(wrong, 5)


class Several(Named):
    def forward(self, tokens, more):
        return super().forward(tokens, more)["logits"], tokens


@pytest.mark.parametrize(
    ("net", "data", "message"),
    [
        (
            Named,
            (INPUTS, TOKENS),
            r"the targets are a tensor \[30, 5\].*one label.*ask spectrum or landscape",
        ),
        (
            Several,
            (INPUTS, LABELS),
            r"the model returns a tuple with \[0\] \[\d+, 3\].*one tensor.*'logits'",
        ),
        (Named, INPUTS, "has no labels"),
        (Named, ({"tokens": TOKENS, "more": MASK[:4]}, LABELS), "x.more has 4"),
    ],
)
def test_what_cannot_be_asked_is_one_error_with_a_remedy(net, data, message, tmp_path):
    run = record(tmp_path / "run", Named(), clients=None)
    with pytest.raises(FldiagError, match=message):
        fldiag.diagnose(fldiag.load(run, model=net(), data=data), "forgetting")


def test_a_run_of_weights_alone_has_drift_and_says_what_the_rest_needs(tmp_path):
    """Targets of every token: distances and cosines are those of the same run with its examples."""
    run = record(tmp_path / "run", Named(), data=(INPUTS, TOKENS), clients=PARTS)
    whole = record(tmp_path / "whole", Named(), data=(INPUTS, LABELS), clients=PARTS)
    assert "its data are given with a question" in " ".join(fldiag.load(run).origin["notes"])
    found, expected = (
        fldiag.diagnose(fldiag.load(r, model=Named()), "drift") for r in (run, whole)
    )
    rows = found[found["metric"] != "missing"]
    both = expected[expected["metric"].isin(rows["metric"].unique())]
    assert "update_cosine" in set(rows["metric"]) and "gradient_norm" not in set(rows["metric"])
    assert rows["value"].tolist() == both[
        "value"
    ].tolist() and "representations are left out" in " ".join(found["note"].dropna())
    fldiag.draw(found)
    for name in ("forgetting", "matching", "fairness"):
        with pytest.raises(FldiagError, match=r"weights alone.*drift and lora.*--data"):
            fldiag.diagnose(fldiag.load(run, model=Named()), name)
    assert len(fldiag.diagnose(fldiag.load(run, model=Named()), "doctor"))


def test_tokens_lie_in_the_runs_folder(tmp_path):
    net = nn.Sequential(nn.Embedding(V, 4), nn.Flatten(), nn.Linear(4 * T, 3))
    run = record(tmp_path / "run", net, data=(TOKENS, LABELS), clients=PARTS)
    given = fldiag.diagnose(fldiag.load(run, model=net, data=(TOKENS, LABELS)), "forgetting")
    assert fldiag.diagnose(fldiag.load(run, model=net), "forgetting")["value"].equals(
        given["value"]
    )


EXAMPLES = TensorDataset(NUMBERS, LABELS)


@pytest.mark.parametrize(
    "clients",
    [
        [Subset(EXAMPLES, p) for p in PARTS],
        [DataLoader(Subset(EXAMPLES, list(p)), 4, shuffle=True) for p in PARTS],
        [Subset(Subset(EXAMPLES, range(N - 1, -1, -1)), [N - 1 - i for i in p]) for p in PARTS],
        [torch.arange(N) < 14, np.arange(N) >= 14],
        {k: torch.tensor(list(p)) for k, p in enumerate(PARTS)},
    ],
)
def test_clients_are_parts_of_the_data_in_the_forms_that_loops_have(clients, tmp_path):
    with fldiag.Recorder(tmp_path / "run", nn.Linear(D, 3), data=EXAMPLES, clients=clients) as rec:
        assert [part.tolist() for part in rec.parts.values()] == [list(p) for p in PARTS]


ORDER = np.random.default_rng(0).permutation(N).tolist()
MIXED = Subset(EXAMPLES, ORDER)
TRAIN, VALIDATION = random_split(EXAMPLES, [20, 10], torch.Generator().manual_seed(0))
SHARES = random_split(TRAIN, [12, 8], torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("data", "clients", "expected"),
    [
        (MIXED, [Subset(MIXED, p) for p in PARTS], [list(p) for p in PARTS]),
        (MIXED, [Subset(Subset(MIXED, range(20)), [3, 1])], [[1, 3]]),
        (MIXED, [MIXED], [list(range(N))]),
        (TRAIN, SHARES, [sorted(s.indices) for s in SHARES]),
        (
            DataLoader(TRAIN, 4),
            [DataLoader(s, 4, shuffle=True) for s in SHARES],
            [sorted(s.indices) for s in SHARES],
        ),
    ],
)
def test_clients_are_parts_of_a_subset(data, clients, expected, tmp_path):
    """Numbered as the data are that were given, whatever these are a part of."""
    with fldiag.Recorder(tmp_path / "run", nn.Linear(D, 3), data=data, clients=clients) as rec:
        assert [part.tolist() for part in rec.parts.values()] == expected
        given = data.dataset if isinstance(data, DataLoader) else data
        assert torch.equal(rec.dataset.train_x, torch.stack([x for x, _ in given]))


NO_PART = r"client 0 has a .* which of the examples.*Subset"
OWN_ORDER = r"DataLoader with an order of its own.*shuffle=False"
SHUFFLED = [DataLoader(EXAMPLES, 4, shuffle=True), DataLoader(EXAMPLES, batch_sampler=[ORDER])]


@pytest.mark.parametrize(
    ("data", "clients", "message"),
    [
        (EXAMPLES, [Subset(TensorDataset(NUMBERS[:9], LABELS[:9]), [0, 1])], NO_PART),
        (EXAMPLES, [DataLoader(EXAMPLES, 4)], NO_PART),
        (EXAMPLES, [(NUMBERS, LABELS)], NO_PART),
        (EXAMPLES, torch.arange(N) % 2, NO_PART),
        (EXAMPLES, [np.ones(7, dtype=bool)], NO_PART),
        (EXAMPLES, [[0.5, 1.0]], NO_PART),
        (MIXED, [Subset(EXAMPLES, [0, 1])], NO_PART),
        (TRAIN, [Subset(VALIDATION, [0])], NO_PART),
        (TRAIN, [VALIDATION], NO_PART),
        (EXAMPLES[:9], [MIXED], NO_PART),
        *((loader, PARTS, OWN_ORDER) for loader in SHUFFLED),
        *((loader, [Subset(EXAMPLES, [0, 1])], OWN_ORDER) for loader in SHUFFLED),
    ],
)
def test_clients_whose_examples_are_unknown_are_refused(data, clients, message, tmp_path):
    with pytest.raises(FldiagError, match=message):
        fldiag.Recorder(tmp_path / "run", nn.Linear(D, 3), data=data, clients=clients)


def test_a_model_by_its_name_needs_the_data_of_a_run_without(tmp_path):
    """It is built for their shape; a module compares weights."""
    net = models.build("mlp", (D,), 3)
    run = record(tmp_path / "run", net, clients=None)
    for name in ("drift", "lora"):
        with pytest.raises(FldiagError, match=r"does not say which data it belongs to.*--data"):
            fldiag.diagnose(fldiag.load(run, model="mlp"), name)
    assert len(fldiag.diagnose(fldiag.load(run, model="mlp", data=(NUMBERS, LABELS)), "drift"))
    assert len(fldiag.diagnose(fldiag.load(run, model=net), "drift"))


@pytest.mark.parametrize("batches", [2, 3, 4, 5, N])
def test_a_list_of_batches_is_the_data_whatever_their_number(batches, tmp_path):
    """Four are no training and test examples. With the question and when the run is recorded."""
    data = [(NUMBERS[i::batches], LABELS[i::batches]) for i in range(batches)]
    net = nn.Linear(D, 3)
    run = fldiag.load(record(tmp_path / "run", net, data=data, clients=PARTS), model=net)
    assert len(run.metrics.query("metric == 'accuracy' and slice == 'train'"))
    given = fldiag.load(run.path / "rounds/0002.safetensors", model=net, data=data)
    values = [
        fldiag.diagnose(target, "spectrum", k=1).query("metric == 'loss'")["value"].item()
        for target in (run, given)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("place", ["test", "clients"])
def test_what_entries_are_is_said_of_test_examples_and_of_the_clients_too(place, tmp_path):
    loader = DataLoader(TensorDataset(NUMBERS, LABELS, TOKENS), 7)
    given = (
        {"data": (NUMBERS, LABELS), "clients": PARTS, "test": loader}
        if place == "test"
        else {"clients": [loader, loader]}
    )
    notes = fldiag.load(record(tmp_path / "run", nn.Linear(D, 3), **given)).origin["notes"]
    assert any(
        "entry 2 is the target; entry 3 is not used" in note
        and note.startswith("test: ") == (place == "test")
        for note in notes
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": None}, "no training examples"),
        ({"data": (NUMBERS, LABELS, NUMBERS, LABELS)}, "split of their own"),
        ({"data": dataset_of((NUMBERS, LABELS))}, "split of their own"),
        ({"data": "digits"}, "split of their own"),
        ({"test": (NUMBERS, LABELS.float())}, r"int64 \[30\], and those of test float32 \[30, 1\]"),
        ({"data": (NUMBERS, LABELS.float())}, "one form"),
        ({"data": (NUMBERS, NUMBERS), "test": (NUMBERS, NUMBERS[:, :2])}, "one form"),
    ],
)
def test_test_examples_are_used_or_refused(given, message, tmp_path):
    with pytest.raises(FldiagError, match=message):
        fldiag.Recorder(
            tmp_path / "run",
            nn.Linear(D, 3),
            **{"data": (NUMBERS, LABELS), "test": (NUMBERS, LABELS), **given},
        )
    record(
        tmp_path / "run",
        nn.Linear(D, 3),
        data=(NUMBERS, LABELS),
        test=(NUMBERS, LABELS),
        clients=PARTS,
    )
