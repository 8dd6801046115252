"""What a Problem takes: kinds of inputs, targets and losses, each against a dense Hessian and in batches of any size."""

import functools
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from problems import data, mlp
from torch import nn
from torch.nn.functional import cross_entropy as CE
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

import fldiag
import fldiag.data
from fldiag.errors import FldiagError
from fldiag.landscape.evaluator import Evaluator
from fldiag.problem import inputs
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.inputs import MOST
from fldiag.problem.problem import Problem

N, T, V = 7, 5, 6
torch.manual_seed(0)
TOKENS, MASK = torch.randint(0, V, (N, T)), torch.rand(N, T) < 0.7
NEXT = TOKENS.roll(-1, 1)
#: One example counts nothing at all, and another little.
IGNORED = NEXT.masked_fill(~MASK, -100)
IGNORED[2], IGNORED[4, 1:] = -100, -100
X, Y = data(N)
WEIGHT = torch.tensor([1.0, 2.0, 5.0])


class Language(nn.Module):
    """Logits [b, T, V] of tokens; ``mask`` hides some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.mix, self.head = nn.Embedding(V, 3), nn.Linear(3, 4), nn.Linear(4, V)

    def forward(self, tokens, mask=None):
        h = self.table(tokens)
        h = h if mask is None else h * mask[..., None]
        return self.head(torch.tanh(self.mix(h + h.mean(1, keepdim=True))))


class Own(Language):
    """As transformers' models do: labels among the inputs, and the mean over those that count as ``loss``."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, tokens, labels=None):
        z = super().forward(tokens)
        if self.shift:
            return {"loss": CE(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": z}
        return {"loss": CE(z.flatten(0, 1), labels.flatten()), "logits": z}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, left, right):
        return torch.tanh(self.a(left)) * self.b(right)


def masked(z, batch):
    return (CE(z.transpose(1, 2), batch["next"], reduction="none") * batch["mask"]).sum(), batch[
        "mask"
    ].sum()


def hidden(z, batch):  # the same, where no loss of one example can be taken
    float(z.detach().sum())
    return masked(z, batch)


def wide():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 4)))


Pair = namedtuple("Pair", "left right")
WORDS = {"tokens": TOKENS, "next": NEXT, "mask": MASK.double()}
#: name -> model, loss, data, and the loss of all examples at once as a function of (outputs).
KINDS = {
    "classes": (mlp, CE, (X, Y), lambda z: CE(z, Y)),
    "dict": (Language, masked, WORDS, lambda z: masked(z, WORDS)[0] / MASK.sum()),
    "mapped by nobody": (Language, hidden, WORDS, lambda z: masked(z, WORDS)[0] / MASK.sum()),
    "tuple": (Two, CE, ((X, X.flip(0)), Y), lambda z: CE(z, Y)),
    "named": (Two, CE, (Pair(X, X.flip(0)), Y), lambda z: CE(z, Y)),
    "dict and targets": (Two, CE, ({"right": X.flip(0), "left": X}, Y), lambda z: CE(z, Y)),
    "tokens": (Language, CE, (TOKENS, NEXT), lambda z: CE(z.flatten(0, 1), NEXT.flatten())),
    "classes first": (
        wide,
        CE,
        (X, Y[:, None].repeat(1, 4)),
        lambda z: CE(z, Y[:, None].repeat(1, 4)),
    ),
    "ignored": (Language, CE, (TOKENS, IGNORED), lambda z: CE(z.flatten(0, 1), IGNORED.flatten())),
    "ignored examples": (
        mlp,
        functools.partial(CE, ignore_index=1),
        (X, Y),
        lambda z: CE(z, Y, ignore_index=1),
    ),
    "class weights": (
        mlp,
        nn.CrossEntropyLoss(weight=WEIGHT),
        (X, Y),
        lambda z: CE(z, Y, weight=WEIGHT.to(z)),
    ),
    "weights and ignored": (
        Language,
        functools.partial(CE, weight=torch.arange(1.0, V + 1), label_smoothing=0.1),
        (TOKENS, IGNORED),
        lambda z: CE(
            z.flatten(0, 1),
            IGNORED.flatten(),
            weight=torch.arange(1.0, V + 1).to(z),
            label_smoothing=0.1,
        ),
    ),
    "smoothed": (
        mlp,
        functools.partial(CE, label_smoothing=0.2),
        (X, Y),
        lambda z: CE(z, Y, label_smoothing=0.2),
    ),
    "logarithms": (
        lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)),
        nn.NLLLoss(weight=WEIGHT),
        (X, Y),
        lambda z: F.nll_loss(z, Y, weight=WEIGHT.to(z)),
    ),
    "multi-label": (
        mlp,
        F.binary_cross_entropy_with_logits,
        (X, (X[:, :3] > 0).float()),
        lambda z: F.binary_cross_entropy_with_logits(z, (X[:, :3] > 0).to(z)),
    ),
    "probabilities": (
        mlp,
        CE,
        (X, X[:, :3].softmax(1)),
        lambda z: CE(z, X[:, :3].softmax(1).to(z)),
    ),
    "own loss": (
        lambda: Own(False),
        lambda out, batch: out["loss"],
        {"tokens": TOKENS, "labels": IGNORED},
        lambda z: z["loss"],
    ),
    "own shifted loss": (
        lambda: Own(True),
        lambda out, batch: out["loss"],
        {"tokens": TOKENS, "labels": IGNORED},
        lambda z: z["loss"],
    ),
    "picked": (
        lambda: Own(True),
        lambda out, batch: CE(out["logits"].flatten(0, 1), batch["tokens"].flatten()),
        {"tokens": TOKENS, "labels": NEXT},
        lambda z: CE(z["logits"].flatten(0, 1), TOKENS.flatten()),
    ),
}


def dense(p, loss):
    """Value, gradient and Hessian of a loss of the outputs on all examples, in float64 and without any batch."""
    x, _ = p.read(0, p.n)
    f = lambda w: loss(p.call(w, x))  # noqa: E731
    return f(p.w), torch.func.grad(f)(p.w), torch.func.hessian(f)(p.w)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_whole_loss_whatever_the_batches(kind):
    net, loss, given, whole = KINDS[kind]
    value, gradient, hessian = dense(Problem(net(), loss, given, dtype=torch.float64), whole)
    v = torch.randn(len(gradient), dtype=torch.float64)
    for bounds in (None, [(i, i + 1) for i in range(N)], [(0, 4), (4, 7)]):
        p = Problem(net(), loss, given, dtype=torch.float64)
        if bounds:
            p.__dict__["bounds"] = bounds
        assert p.loss()[0] == pytest.approx(float(value), rel=1e-12)
        assert torch.allclose(p.gradient(), gradient, rtol=1e-9, atol=1e-12)
        assert torch.allclose(p.hvp(v), hessian @ v, rtol=1e-9, atol=1e-11)
        assert Evaluator(p, [v])(0.1)[0] == pytest.approx(p.loss(p.w + 0.1 * v)[0], rel=1e-12)


@pytest.mark.parametrize("kind", ["class weights", "ignored examples", "smoothed"])
def test_the_exact_diagonal_follows_what_is_counted(kind):
    _, loss, given, whole = KINDS[kind]
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    p = Problem(net, loss, given, dtype=torch.float64)
    found = diagonal_of(p, estimate="exact")
    assert torch.allclose(found.values, dense(p, whole)[2].diagonal(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", ["dict", "ignored", "weights and ignored"])
def test_the_standard_error_is_that_of_a_ratio(kind):
    """Against many slices drawn with replacement from the examples."""
    net, loss, given, _ = KINDS[kind]
    p = Problem(net(), loss, given, dtype=torch.float64)
    value, stderr = p.loss()
    sums = p.losses()
    counts = p._counts()
    assert float(counts.mean()) == pytest.approx(1) and float(sums.mean()) == pytest.approx(value)
    rng = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, N, (20_000, N), generator=rng)
    ratios = sums[drawn].sum(1) / counts[drawn].sum(1)
    spread = float(ratios[ratios.isfinite()].std()) * (N / (N - 1)) ** 0.5
    assert stderr == pytest.approx(spread, rel=0.5)  # first order, on seven examples
    assert (
        float(sums.std()) / N**0.5 > 1.5 * stderr
    )  # what it is when the count is taken for certain


def test_what_was_found_out_is_said():
    told = {kind: Problem(net(), loss, given) for kind, (net, loss, given, _) in KINDS.items()}
    for p in told.values():
        p.probe()
    said = {kind: " ".join(p.remarks) for kind, p in told.items()}
    left = int((IGNORED != -100).sum())
    assert said["classes"] == said["smoothed"] == said["multi-label"] == ""
    assert (
        f"{N * T - left} targets are ignored" in said["ignored"] and "last axis" in said["tokens"]
    )
    assert f"over {left} labels that are not -100" in said["own loss"]
    assert (
        f"{int((IGNORED[:, 1:] != -100).sum())} labels after the first" in said["own shifted loss"]
    )
    assert f"{int(MASK.sum())} in 7 examples" in said["dict"]


# -- data sets and loaders


class Sentences(Dataset):
    def __init__(self, length=lambda i: T):
        self.length, self.reads = length, 0

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.reads += 1
        return {
            "tokens": TOKENS[i, : self.length(i)],
            "next": NEXT[i, : self.length(i)],
            "mask": MASK[i, : self.length(i)].double(),
        }


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_data_sets_and_loaders_are_drawn_once_in_a_fixed_order():
    net, sentences = Language(), Sentences()
    expected, state = Problem(net, masked, WORDS).loss(), torch.get_rng_state()
    for given in (
        sentences,
        DataLoader(Sentences(), batch_size=3),
        DataLoader(Sentences(), batch_size=3, shuffle=True),
    ):
        p = Problem(net, masked, given)
        assert p.loss() == pytest.approx(expected, rel=1e-6) and p.loss() == p.loss() and p.n == N
    assert sentences.reads == N and torch.equal(state, torch.get_rng_state())
    pair = Problem(mlp(), CE, (X, Y)).loss()
    for given in (
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), 2),
        Stream(),
        [X.numpy(), Y.numpy()],
    ):
        assert Problem(mlp(), CE, given).loss() == pytest.approx(pair, rel=1e-6)
    assert (
        Problem(Two(), CE, TensorDataset(X, X.flip(0), Y)).loss()
        == Problem(Two(), CE, ((X, X.flip(0)), Y)).loss()
    )


class Large(Dataset):
    """Many examples, of which none is held; ``noise``: they change whenever they are read."""

    def __init__(self, n=40, noise=0.0):
        self.n, self.noise, self.reads = n, noise, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads += 1
        if not 0 <= i < self.n:
            raise IndexError(i)
        return X[i % N] * (1 + i) + self.noise * torch.rand(()), Y[i % N]


@pytest.fixture
def small_memory(monkeypatch):
    """A machine that can hold less than ten examples."""
    monkeypatch.setattr("fldiag.device.memory", lambda: int(10 * X[0].nbytes / MOST))


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: DataLoader(d, 3), lambda d: DataLoader(d, 3, shuffle=True)]
)
def test_a_data_set_larger_than_the_memory_is_read_by_index_with_the_same_numbers(
    wrap, small_memory
):
    table = Large()
    whole = Problem(
        mlp(), CE, tuple(map(torch.stack, zip(*(table[i] for i in range(40)), strict=True)))
    )
    p = Problem(mlp(), CE, wrap(Large()), memory=4000)
    assert p.n == 40 and any("read by index" in text for text in p.remarks)
    assert p.loss() == pytest.approx(whole.loss(), rel=1e-6)
    v = torch.ones_like(p.w)
    assert torch.allclose(p.hvp(v), whole.hvp(v), rtol=1e-4, atol=1e-5)


def test_only_what_is_needed_of_a_large_data_set_is_read(monkeypatch):
    monkeypatch.setattr("fldiag.device.memory", lambda: 10**6)
    table = Large(10**9)
    assert inputs.as_data(table).n == 10**9 and table.reads < 300


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Large(noise=1.0), "other numbers each time.*without what is random"),
        (Stream(), r"a stream of more than .* GiB.*itertools\.islice"),
        (
            DataLoader(Large(), 3, sampler=SubsetRandomSampler(range(20))),
            "chooses its examples itself.*Subset",
        ),
        (DataLoader(Large(), 3, drop_last=True), "chooses its examples itself"),
    ],
)
def test_what_cannot_be_read_by_index_says_what_it_needs(source, words, monkeypatch):
    monkeypatch.setattr("fldiag.device.memory", lambda: 100)
    with pytest.raises(FldiagError, match=words):
        Problem(mlp(), CE, source)


def test_of_a_data_set_of_fldiag_the_training_examples_are_taken():
    digits = fldiag.data.load("digits")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    p = Problem(net, CE, digits)
    assert p.slice_name == "train" and p.n == len(digits.train_y)
    assert p.loss() == Problem(net, CE, fldiag.data.take(digits, "train")).loss()


def test_tokens_stay_integers():
    x, y = Problem(Language(), CE, (TOKENS.int(), NEXT.int()), dtype=torch.float64).batch(0)
    assert (x.dtype, y.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (({"a": X, "b": X[:4]}, Y), r"x\.b has 4 rows and x\.a has 7: every entry"),
        ({"a": X, "b": Y[:2]}, "x.b has 2 rows and x.a has 7"),
        (
            DataLoader(Sentences(lambda i: 3 + (i > 4)), batch_size=5),
            r"batch 2 .* of shape \[4\] an example, and the first \[3\].*unequal",
        ),
        (Sentences(lambda i: 3 + i % 2), "cannot be combined into a batch"),
        ({}, "holds no tensor"),
        (({"a": "text"}, Y), "x.a of the data is a str"),
        (TensorDataset(X), "without targets"),
    ],
)
def test_data_that_do_not_fit_together(given, message):
    with pytest.raises(FldiagError, match=message) as caught:
        Problem(mlp(), CE, given)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("net", "loss", "given", "message"),
    [
        (
            Language,
            CE,
            (TOKENS, NEXT[:, :3]),
            r"outputs a tensor \[7, 5, 6\] and targets a tensor \[7, 3\]",
        ),
        (
            lambda: Own(False),
            CE,
            ({"tokens": TOKENS, "labels": NEXT}, NEXT),
            r"outputs a dict with loss \[\], logits \[7, 5, 6\] and targets",
        ),
        (Language, CE, (TOKENS, NEXT + 3), "has label [678], the model has 6 outputs"),
        (
            lambda: nn.Sequential(nn.Linear(4, 9), nn.Unflatten(1, (3, 3))),
            CE,
            (X, Y[:, None].repeat(1, 3)),
            "unclear which axis holds the classes",
        ),
        (
            mlp,
            nn.CrossEntropyLoss(weight=torch.ones(4)),
            (X, Y),
            "4 class weights, and the model 3 outputs",
        ),
        (mlp, functools.partial(CE, ignore_index=0), (X, 0 * Y), "counts none"),
        (mlp, lambda z, y: (z.sum(), z.detach().abs().sum()), (X, Y), "depends on the outputs"),
        (Language, lambda z, b: masked(z, b)[0] / b["mask"].sum(), WORDS, r"return \(sum, count\)"),
        (
            lambda: Own(False),
            lambda out, b: 1.0 * out["loss"],
            {"tokens": TOKENS, "labels": IGNORED},
            r"return \(sum, count\)",
        ),
    ],
)
def test_what_does_not_fit_the_outputs_is_named(net, loss, given, message):
    with pytest.raises(FldiagError, match=message) as caught:
        Problem(net(), loss, given).loss()
    assert caught.value.remedy


# -- which entry is what


class Inputs(nn.Module):
    """``of``: the logits of these inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def of(self, x, other=None):
        return self.a(x) if other is None else torch.tanh(self.a(x)) * self.b(other)


class OneInput(Inputs):
    def forward(self, x, *, scale=1.0):
        return self.of(x)


class TwoInputs(Inputs):
    def forward(self, x, other, mask=None):
        return self.of(x, other)


class OptionalInput(Inputs):
    def forward(self, x, other=None):
        return self.of(x, other)


class AllOptional(Inputs):
    def forward(self, x=None, other=None, labels=None):
        return self.of(x, other)


class AnyInputs(Inputs):
    def forward(self, *inputs):
        return self.of(*inputs)


class TupleInput(Inputs):
    def forward(self, pair):
        x, other = pair
        return self.of(x, other)


class Files(Dataset):
    """Examples with a name, as of files."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return X[i], Y[i], f"{i}.png"


OTHER, DOMAIN = X.flip(0), torch.arange(N) % 2
ONE, TWO = (
    ((X, Y), "of {} entries, entry 1 is the input and entry 2 is the target"),
    (
        ((X, OTHER), Y),
        "of {} entries, entry 1 and entry 2 are the inputs and entry 3 is the target",
    ),
)
#: net, entries, what they stand for, and what is said after that.
DECIDED = [
    (OneInput, (X, Y, DOMAIN), ONE, "; entry 3 is not used"),
    (OneInput, (X, Y, DOMAIN, DOMAIN), ONE, "; entry 3 and entry 4 are not used"),
    (TwoInputs, (X, OTHER, Y), TWO, ""),
    (Two, (X, OTHER, Y), TWO, ""),
    (Two, (X, OTHER, Y, DOMAIN), TWO, "; entry 4 is not used"),
    (lambda: nn.Sequential(OneInput()), (X, Y, DOMAIN), ONE, "; entry 3 is not used"),
]


@pytest.mark.parametrize(
    "source",
    [
        lambda *t: DataLoader(TensorDataset(*t), 3),
        TensorDataset,
        lambda *t: t,
        lambda *t: list(DataLoader(TensorDataset(*t), 3)),
    ],
    ids=["loader", "set", "tuple", "batches"],
)
@pytest.mark.parametrize(("net", "entries", "meaning", "more"), DECIDED)
def test_the_required_arguments_decide_which_entry_is_the_target_and_that_is_said(
    net, entries, meaning, more, source
):
    (pair, text) = meaning
    p = Problem(net(), CE, source(*entries))
    assert p.loss()[0] == pytest.approx(Problem(net(), CE, pair).loss()[0], rel=1e-6)
    assert p.remarks[-1] == text.format(len(entries)) + more


def test_an_entry_that_is_not_used_may_be_anything():
    p = Problem(OneInput(), CE, DataLoader(Files(), 3))
    assert p.loss()[0] == pytest.approx(Problem(OneInput(), CE, (X, Y)).loss()[0], rel=1e-6)
    assert p.remarks == [ONE[1].format(3) + "; entry 3 is not used"]


@pytest.mark.parametrize(
    ("net", "entries", "pairs"),
    [
        (OptionalInput, (X, Y, DOMAIN), lambda loader: [(a, b) for a, b, _ in loader]),
        (OptionalInput, (X, OTHER, Y), lambda loader: [((a, b), y) for a, b, y in loader]),
        (AllOptional, (X, OTHER, Y), lambda loader: [((a, b), y) for a, b, y in loader]),
        (AnyInputs, (X, OTHER, Y), lambda loader: [((a, b), y) for a, b, y in loader]),
        (TwoInputs, (X, OTHER, DOMAIN, Y), lambda loader: [((a, b), y) for a, b, _, y in loader]),
        (TupleInput, (X, OTHER, Y), lambda loader: [((a, b), y) for a, b, y in loader]),
    ],
)
def test_entries_that_arguments_do_not_decide_are_refused_with_a_remedy_that_works(
    net, entries, pairs
):
    loader = DataLoader(TensorDataset(*entries), 3)
    with pytest.raises(FldiagError, match="entry 1") as caught:
        Problem(net(), CE, loader).loss()
    assert "give pairs (inputs, target)" in caught.value.remedy
    if net is not TupleInput:
        assert (
            "entry 1: float32 [3, 4]" in caught.value.what
            and "int64 [3]" in caught.value.what
            and caught.value.usage
        )
    used = entries[:2] if len(pairs(loader)[0][0]) == 2 else entries[0]
    target = entries[-1] if isinstance(used, tuple) else Y
    assert Problem(net(), CE, pairs(loader)).loss()[0] == pytest.approx(
        Problem(net(), CE, (used, target)).loss()[0], rel=1e-6
    )


def test_entries_without_a_target():
    class Three(Inputs):
        def forward(self, x, other, third):
            return self.of(x, other)

    with pytest.raises(
        FldiagError, match=r"has 3 entries .* takes \(x, other, third\): there is no target"
    ):
        Problem(Three(), CE, TensorDataset(X, OTHER, Y))


@pytest.mark.parametrize(
    "batches",
    [
        [(X[:3], Y[:3]), (X[3:], Y[3:])],
        [[X[:3].numpy(), Y[:3].numpy()], [X[3:].numpy(), Y[3:].numpy()]],
        ((X[:2], Y[:2]), (X[2:5], Y[2:5]), (X[5:], Y[5:])),
        list(TensorDataset(X, Y)),
        [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    ],
    ids=["tuples", "arrays", "three", "examples", "examples with numbers"],
)
def test_a_list_of_batches_or_examples_is_data(batches):
    assert Problem(mlp(), CE, batches).loss()[0] == pytest.approx(
        Problem(mlp(), CE, (X, Y)).loss()[0], rel=1e-6
    )


def test_a_list_of_dicts_is_data_and_two_dicts_are_not_batches():
    halves = [{k: v[w] for k, v in WORDS.items()} for w in (slice(0, 3), slice(3, N))]
    p = Problem(Language(), masked, halves)
    assert p.loss()[0] == pytest.approx(Problem(Language(), masked, WORDS).loss()[0], rel=1e-6)
    assert p.remarks[0] == "the data are a list of 2 batches"
    assert (
        Problem(
            Two(), lambda z, y: CE(z, y["class"]), [{"left": X, "right": OTHER}, {"class": Y}]
        ).remarks
        == []
    )


class Graph(nn.Module):
    """Every node adds up what its neighbours say."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3)

    def forward(self, nodes, edges):
        h = self.layer(nodes)
        return h.index_add(0, edges[1], h[edges[0]])


class Graphs(nn.Module):
    """As the remedy says."""

    def __init__(self):
        super().__init__()
        self.net = Graph()

    def forward(self, nodes, edges):
        return torch.stack([self.net(*graph) for graph in zip(nodes, edges, strict=True)])


def test_a_graph_is_one_example():
    edges = torch.stack([torch.arange(12) % N, (torch.arange(12) * 5) % N])
    for given in (((X, edges), Y), (X, edges, Y), ((X, edges.T), Y)):
        with pytest.raises(
            FldiagError, match=r"x\[1\] has (2|12) rows and x\[0\] has 7: every entry needs one row"
        ) as caught:
            Problem(Graph(), CE, given)
        assert "(nodes[None], edges[None]), targets[None]" in caught.value.remedy
    p = Problem(Graphs(), CE, ((X[None], edges[None]), Y[None]), dtype=torch.float64)
    net, nodes = Graph(), X.double()

    def loss(w):
        weights = {"layer.weight": w[:12].reshape(3, 4), "layer.bias": w[12:]}
        return CE(torch.func.functional_call(net, weights, (nodes, edges)), Y)

    assert p.loss()[0] == pytest.approx(float(loss(p.w)), rel=1e-12)
    v = torch.ones(15, dtype=torch.float64)
    assert torch.allclose(p.hvp(v), torch.func.hessian(loss)(p.w) @ v, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((X, OTHER[:4]), Y), r"x\[1\] has 4 rows and x\[0\] has 7"),
        ((X, Y[:4]), "y has 4 rows and x has 7"),
        ([(X[:3], Y[:3]), (X[3:], Y[3:4])], "y has 1 row and x has 4 in batch 2"),
        (
            [(X[:3], Y[:3]), (X[3:, :2], Y[3:])],
            r"batch 2 of the list has x of shape \[2\] an example, and the first \[4\]",
        ),
    ],
)
def test_unequal_lengths_are_named(given, message):
    with pytest.raises(FldiagError, match=message):
        Problem(mlp(), CE, given)
