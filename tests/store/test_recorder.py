"""The Recorder: every form of weights, data and clients; what a loop does wrongly; what a disk does."""

import copy
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from reference import clients_of, value
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, Subset, TensorDataset

import fldiag
from fldiag.config import of_run
from fldiag.results import files
from fldiag.runs.run import Run
from fldiag.training.setup import Setup

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
PARTS = [range(10), range(10, 24)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x))


def net(seed=0):
    torch.manual_seed(seed)
    module = Net()
    module(torch.randn(9, 4))
    return module


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def refused(words):
    return pytest.raises(fldiag.FldiagError, match=words)


def recorder(out, model=None, **options):
    options = {"data": (X, Y), "clients": PARTS, **options}
    return fldiag.Recorder(out, model or net(), **options)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def record(out):
    with recorder(out) as record:
        yield record


def one_round(out, a=None, b=None, **options):
    a = a or net()
    b = b or a
    with recorder(out, a, **options) as record:
        record.round(received=a, clients={0: b, 1: b}, aggregated=b)
    return record.run


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(v, b[n]) for n, v in a.items())


FORMS = {
    "module": lambda m: m,
    "wrapped": nn.DataParallel,
    "state_dict": lambda m: m.state_dict(),
    "prefix": lambda m: {f"module.{n}": v for n, v in m.state_dict().items()},
    "float64": lambda m: {n: v.double() for n, v in m.state_dict().items()},
    "arrays": lambda m: [v.numpy() for v in m.state_dict().values()],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_is_stored_to_the_bit(form, out):
    start, end, model = net(1), net(2), net(1)
    given = FORMS[form](end)
    with recorder(out, model) as record:
        record.round(received=FORMS[form](start), clients={1: given}, aggregated=given)
    c = record.run.checkpoint(1)
    assert same(c.state, end.state_dict()) and same(model.state_dict(), start.state_dict())
    assert torch.equal(c.received, flat(start))
    assert torch.equal(clients_of(c)[1].float(), flat(end))
    assert torch.equal(c.buffers["norm.running_var"][0], end.norm.running_var)


def test_a_flat_vector_has_the_parameters(record):
    w = torch.arange(23.0)
    record.round(received=w, clients={0: w.numpy()}, aggregated=w)
    assert torch.equal(record.run.checkpoint(1).clients[0], w)


def test_what_is_recorded_is_the_state_at_the_call(record):
    module = net()
    before = flat(module)
    record.client(0, module)
    module.head.weight.data.zero_()
    record.round(aggregated=module)
    assert torch.equal(record.run.checkpoint(1).clients[0], before)


def test_clients_that_start_from_weights_of_their_own(record):
    a, b, c = net(1), net(2), net(3)
    record.round(received=a, clients={0: a, 1: a}, aggregated=c)
    record.round(received={1: b, 0: a}, clients={0: c, 1: c}, aggregated=c)
    with refused("what client 1 received"):
        record.round(received={0: a}, clients={0: c, 1: c}, aggregated=c)
    stored = record.run.checkpoint(2)
    assert torch.equal(stored.starts, torch.stack([flat(a), flat(b)]))
    assert torch.equal(stored.received, flat(c))
    assert torch.equal(stored.start_buffers["norm.running_mean"][1], b.norm.running_mean)


# The recorded numbers are those of the user's own eval()


class Composed(nn.Module):
    """A weight that eval() composes of two factors, and keeps."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))
        self.whole = None

    def train(self, mode=True):
        self.whole = None if mode else (self.up @ self.down).detach()
        return super().train(mode)

    def forward(self, x):
        return x @ (self.up @ self.down if self.whole is None else self.whole).T


class Merging(Composed):
    """As loralib's layers: the factors merge into the weights beneath them where training is switched off."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 3)

    def train(self, mode=True):
        if mode != (self.whole is None):
            self.base.weight.data.add_(self.up @ self.down, alpha=-1.0 if mode else 1.0)
        return super().train(mode)

    def forward(self, x):
        return self.base(x) + (super().forward(x) if self.whole is None else 0)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_model_whose_eval_merges_weights_is_refused_by_name(mode, out):
    with refused(r"eval\(\) of the model rewrites"):
        recorder(out, Merging().train(mode))
    assert not out.exists()


@pytest.mark.parametrize("model", [Net, Composed], ids=["norm", "composed"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_the_loss_is_that_of_the_users_own_eval(model, mode, out):
    torch.manual_seed(3)
    module, (x, y) = model().train(mode), (X[:9], Y[:9])
    z = copy.deepcopy(module).eval()(x).detach()
    run = one_round(out, module, test=(x, y))
    accuracy = float((z.argmax(1) == y).float().mean())
    assert value(run.metrics, "loss") == pytest.approx(float(cross_entropy(z, y)), rel=1e-5)
    assert value(run.metrics, "accuracy") == pytest.approx(accuracy)


@pytest.mark.parametrize(
    "targets",
    [one_hot(Y, 3).float(), one_hot(Y, 3), 0.8 * one_hot(Y, 3) + 0.2 / 3],
    ids=["one-hot", "integers", "smoothed"],
)
def test_one_hot_labels_are_classes_and_a_note_says_so(targets, tmp_path):
    run, plain = (one_round(tmp_path / str(i), data=(X, y)) for i, y in enumerate((targets, Y)))
    names = ["metric", "value"]
    assert run.metrics[names].equals(plain.metrics[names])
    assert "classes" in str(run.origin["notes"]) and not plain.origin["notes"]


def test_targets_that_are_numbers_have_half_their_squared_error(out):
    y = torch.randn(24, 3)
    module = net().eval()
    run = one_round(out, module, data=(X, y))
    expected = (module(X) - y).square().sum(1).mean() / 2
    assert value(run.metrics, "loss") == pytest.approx(expected.item(), rel=1e-5)
    assert "accuracy" not in set(run.metrics["metric"])


CANNOT = {
    "raises": (nn.Linear(7, 3), "mat1"),
    "two outputs of three": (nn.Linear(4, 2), "2 outputs"),
    "probabilities": (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), "probabilities"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_a_test_that_cannot_be_made_is_a_note_and_one_warning(case, out):
    module, word = CANNOT[case]
    with warnings.catch_warnings(record=True) as caught, recorder(out, module) as r:
        warnings.simplefilter("always")
        for _ in range(2):
            r.round(received=module, clients={0: module}, aggregated=module, metrics={"lr": 1})
    run = fldiag.load(out)
    assert run.done == 2 and "loss" not in set(run.metrics["metric"])
    assert sum("could not be evaluated" in str(w.message) for w in caught) == 1
    assert word in str(run.origin["notes"])


# Data and clients


class Reader(nn.Module):
    """Reads token numbers and a mask, as transformers do."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, ids, mask=None):
        z = self.embed(ids)
        z = z if mask is None else z * mask[..., None]
        return {"logits": self.head(z.mean(1))}


RNG = torch.Generator().manual_seed(1)
TEXTS = {"ids": torch.randint(0, 7, (24, 6), generator=RNG)}
TEXTS |= {"mask": torch.rand(24, 6, generator=RNG), "labels": Y}
AT = {"moment": "aggregated", "scope": "global", "slice": "train"}


def test_inputs_by_name(out):
    module = Reader()
    run = one_round(out, module, data=TEXTS)
    expected = cross_entropy(module(TEXTS["ids"], TEXTS["mask"])["logits"], Y).item()
    assert value(run.metrics, "loss") == pytest.approx(expected, rel=1e-5)
    table = fldiag.diagnose(run, "forgetting", model=module)
    assert value(table, "loss", round=1, **AT) == pytest.approx(expected, rel=1e-5)


LAID = {
    "lists": ((X, Y), [list(p) for p in PARTS]),
    "dict": ((X, Y), {1: np.arange(10, 24), "0": np.arange(10)}),
    "subsets": (DATA := TensorDataset(X, Y), [Subset(DATA, list(p)) for p in PARTS]),
    "loaders": (DATA, [DataLoader(Subset(DATA, list(p)), shuffle=True) for p in PARTS]),
    "loader": (DataLoader(DATA, batch_size=5, shuffle=True), PARTS),
    "parts of a part": (
        DATA,
        [Subset(Subset(DATA, range(23, -1, -1)), [23 - i for i in p]) for p in PARTS],
    ),
    "examples": (None, [(X[list(p)], Y[list(p)]) for p in PARTS]),
}


@pytest.mark.parametrize("form", LAID)
def test_every_form_of_data_and_clients_is_the_same_run(form, out, tmp_path):
    data, clients = LAID[form]
    run = one_round(out, data=data, clients=clients)
    plain = one_round(tmp_path / "plain")
    for name in ("partition.npz", "data.npz"):
        assert run.files[name] == plain.files[name]
    assert run.about["provenance"]["data"] == plain.about["provenance"]["data"]


def test_clients_have_test_examples_of_their_own(out):
    tests = [[0, 2], [1, 3, 5]]
    run = one_round(out, test=(X[:6], Y[:6]), test_clients=tests)
    table = fldiag.diagnose(run, "fairness", model=net(), on="test", min_count=1)
    right = (net().eval()(X[:6]).argmax(1) == Y[:6]).double()
    for k, index in enumerate(tests):
        accuracy = value(table, "accuracy", client=k, scope="client")
        assert accuracy == pytest.approx(float(right[index].mean()))


def test_a_run_that_moved_brings_its_examples(out, tmp_path):
    one_round(out, test=(X[:9], Y[:9]))
    out.rename(tmp_path / "other")
    table = fldiag.diagnose(fldiag.load(tmp_path / "other", model=net()), "forgetting")
    assert set(table["slice"]) >= {"test", "client:0/train", "client:1/train"}


# What a loop does wrongly


def fitting(**wrong):
    good = {"received": net(), "clients": {0: net(), 1: net()}, "aggregated": net()}
    return lambda record: record.round(**{**good, **wrong})


def changed(change):
    return {n: change(v) for n, v in net().state_dict().items()}


WRONG = {
    "shape": (fitting(aggregated=nn.Linear(4, 2)), "lacks"),
    "length": (fitting(aggregated=torch.zeros(5)), "23 parameters"),
    "no weights": (fitting(aggregated=3), "int"),
    "no array": (fitting(aggregated=changed(lambda v: {})), "dict"),
    "meta": (fitting(aggregated=changed(lambda v: v.to("meta"))), "meta"),
    "sparse": (fitting(clients={0: changed(lambda v: v.to_sparse())}), "sparse"),
    "complex": (fitting(received=changed(lambda v: v * 1j)), "complex"),
    "metric": (fitting(metrics={"a": 10**400}), "'a'"),
    "text": (fitting(metrics={"a": "high"}), "'a'"),
    "unknown client": (fitting(clients={2: net()}), "client 2"),
    "named client": (fitting(clients={"site": net()}), "'site'"),
    "negative client": (fitting(clients={-1: net()}), "-1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_error_that_leaves_nothing_behind(record, case, out):
    call, word = WRONG[case]
    fitting()(record)
    before = sorted(p.name for p in out.rglob("*"))
    record.client(1, net(7), metrics={"b": 1.0})
    with refused(word):
        call(record)
    assert sorted(p.name for p in out.rglob("*")) == before
    record.round(clients={0: net()}, aggregated=net())
    run = fldiag.load(out)
    assert run.done == 2 and run.checkpoint(2).client_ids == [0]
    assert "b" not in set(run.metrics["metric"])


def test_a_client_that_is_recorded_again_replaces_its_numbers(record):
    for loss in (3.0, 2.0):
        record.client(1, net(), metrics={"own": loss})
    record.round(aggregated=net())
    assert value(record.run.metrics, "own", client=1) == 2.0


FORKED = []  # the recorder that a child inherits


def another_round():
    FORKED[-1].round(aggregated=net())


def test_other_threads_and_forked_children_are_refused_in_words(record, out):
    FORKED.append(record)
    fork = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    for other in (ThreadPoolExecutor(1), fork):
        with other, refused("another thread or process"):
            other.submit(another_round).result()
    fitting()(record)
    record.close()
    assert fldiag.load(out).status == "finished"


GIVEN = {
    "shuffled": ({"data": DataLoader(DATA, sampler=[3, 1, 2])}, "order of its own"),
    "other data": ({"clients": [Subset(TensorDataset(X[:9], Y[:9]), [0])]}, "Subset"),
    "floats": ({"clients": [[0.5, 1.0]]}, "which of the examples"),
    "targets": ({"data": (X, torch.rand(24))}, "targets"),
    "forms": ({"test": (X, torch.randn(24, 3))}, "different forms"),
    "test clients": ({"test": (X, Y), "test_clients": [[24]]}, "24"),
    "no clients": ({"clients": []}, "no clients"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_what_does_not_fit_is_refused_before_anything_is_written(case, out):
    options, word = GIVEN[case]
    with refused(word):
        recorder(out, **options)
    assert not out.exists()


# Frozen weights


def adapted(seed=0):
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    torch.manual_seed(seed)
    module[0].requires_grad_(False)
    return module


def test_the_base_is_stored_once_and_must_not_move(out):
    module = adapted()
    other = copy.deepcopy(module)
    other[1].weight.data.add_(1)
    with recorder(out, module, trainable=True) as record:
        half = {n: v.double() / 3 * 3 for n, v in other.state_dict().items()}
        record.round(received=module, clients={0: other, 1: half}, aggregated=other)
        moved = copy.deepcopy(other)
        moved[0].weight.data[0, 0] += 0.1
        with refused(r"0\.weight .*client 1"):
            record.round(clients={0: other, 1: moved}, aggregated=other)
        with refused("aggregated"):
            record.round(clients={0: other}, aggregated=moved)
    c = record.run.checkpoint(1)
    assert set(c.state) == {"1.weight", "1.bias"} and c.clients.shape == (2, 21)
    expected = cross_entropy(other(X), Y).item()
    assert value(record.run.metrics, "loss") == pytest.approx(expected, rel=1e-5)
    table = fldiag.diagnose(record.run, "forgetting", model=adapted(5))
    assert value(table, "loss", **AT) == pytest.approx(expected, rel=1e-5)


# Going on


def test_a_run_goes_on_as_one_that_never_stopped(out, tmp_path):
    nets = [net(i) for i in range(4)]

    def play(record, rounds):
        for t in rounds:
            record.round(clients={0: nets[t], 1: nets[0]}, aggregated=nets[t])

    with recorder(tmp_path / "whole") as record:
        play(record, (1, 2, 3))
    first = recorder(out)
    play(first, (1,))
    with (out / "rounds.jsonl").open("ab") as file:
        file.write(b'{"half a line')
    (out / "rounds" / "0002.safetensors").write_bytes(b"half a file")
    with recorder(out, resume=True) as record:  # in the place of the first
        play(record, (2, 3))
    with refused("closed"):
        play(first, (2,))
    for r in (1, 2, 3):
        a, b = (fldiag.load(tmp_path / name).checkpoint(r) for name in ("run", "whole"))
        assert torch.equal(a.clients, b.clients) and same(a.state, b.state)
        assert (a.received is None) == (b.received is None) == (r == 1)


@pytest.mark.parametrize(
    "options",
    [
        {"data": (X + 1, Y)},
        {"clients": [range(9), range(9, 24)]},
        {"method": "mine"},
        {"seed": 3},
        {"model": nn.Linear(4, 3)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_run_goes_on_with_its_own_model_data_and_partition_alone(options, out):
    one_round(out)
    with refused("model" if "model" in options else "recorded with another"):
        recorder(out, resume=True, **options)
    recorder(out, resume=True).close()


CUT = {
    "line": (files, "append", fldiag.FldiagError, [0, 1, 2]),
    "file": (files, "write_atomic", fldiag.FldiagError, [0, 1, 2]),
    "ctrl-c after the line": (Run, "_add", KeyboardInterrupt, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", CUT)
def test_a_round_that_is_cut_short_counts_once_its_line_is_on_the_disk(
    record, case, out, monkeypatch
):
    owner, name, kind, rounds = CUT[case]
    real, signals = getattr(owner, name), [kind("no space left")]

    def stop(*args, **options):
        if signals:  # the disk stays full; a key is pressed once
            raise signals[0] if owner is files else signals.pop()
        return real(*args, **options)

    fitting()(record)
    with monkeypatch.context() as patch, pytest.raises(kind, match="no space"):
        patch.setattr(owner, name, stop)
        fitting()(record)
    record.round(clients={1: net(5)}, aggregated=net(5))
    record.close()
    run = fldiag.load(out)
    assert (run.rounds, run.status) == (rounds, "finished")
    assert run.checkpoint().client_ids == [1]


@pytest.mark.parametrize("count", [0, 3, 5, 7])
def test_a_disk_that_is_full_at_the_start_is_no_obstacle_later(count, out, monkeypatch):
    """Full after so many flushes: at the partition, the data, the lines, or run.json."""
    flush, done = files.os.fsync, []

    def full(handle):
        if len(done) == count:
            raise OSError(28, "no space left")
        done.append(flush(handle))

    with monkeypatch.context() as disk, refused("no space"):
        disk.setattr(files.os, "fsync", full)
        recorder(out)
    one_round(out)


def test_training_in_a_recorded_federation_with_inputs_of_several_tensors(out, tmp_path):
    module = Reader()
    one_round(out, module, data=TEXTS, test=TEXTS)
    keys = {"model.name": "mlp", "rounds": 1, "train.epochs": 1, "train.batch_size": 24}
    config = of_run(fldiag.load(out), keys)
    setup = Setup(config, module=module)
    run = fldiag.train(config, out=tmp_path / "trained", setup=setup)
    expected, lr = copy.deepcopy(module), config.train.lr
    states = []
    for part in PARTS:
        own = copy.deepcopy(expected)
        ids, mask, y = (t[list(part)] for t in TEXTS.values())
        cross_entropy(own(ids, mask)["logits"], y).backward()
        states.append({n: p.detach() - lr * p.grad for n, p in own.named_parameters()})
    for name, v in run.checkpoint().state.items():
        mean = sum(len(p) * s[name] for p, s in zip(PARTS, states, strict=True)) / 24
        assert torch.allclose(v, mean, rtol=1e-5, atol=1e-6)
