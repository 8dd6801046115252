"""Recording Flower: its own strategies, messages, records and client apps drive what is recorded; only the network
between server and clients is left out."""

import copy
import importlib
import sys
from collections import OrderedDict
from pathlib import Path

import helpers
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.integrations import flower
from fldiag.runs.history import History
from fldiag.runs.run import Run


@pytest.fixture(autouse=True)
def _task(monkeypatch):
    """Flower numbers messages by the task of the process, which its launcher sets."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


NODES = {4_000_000_007: 0, 17: 1, 900: 2}  # node id -> partition id
SIZES = (20, 13, 7)


def world():
    data, parts = helpers.classification(SIZES)
    torch.manual_seed(0)
    return (
        data,
        parts,
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
    )


def app(data, parts, module, names=True, broken=(), mods=()):
    """A real client app: some steps of SGD on the client's examples."""
    made = ClientApp(mods=list(mods))

    @made.train()
    def train(message: Message, context: Context) -> Message:
        k = context.node_config["partition-id"]
        if k in broken:
            raise RuntimeError("no battery")
        net = copy.deepcopy(module)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        net.train()
        x, y = data.normalise(data.train_x[parts[k]]), data.train_y[parts[k]]
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimiser.step()
        metrics = {
            "num-examples": len(y),
            "loss": float(loss),
            **({"partition-id": k} if names else {}),
        }
        return Message(
            RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}),
            reply_to=message,
        )

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        k = context.node_config["partition-id"]
        metrics = {
            "num-examples": len(parts[k]),
            "eval_acc": 0.25 * k,
            **({"partition-id": k} if names else {}),
        }
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return made


class InProcess(Grid):
    """Hands every message to the client app of its node, in this process; keeps what went both ways."""

    def __init__(self, app):
        self.app, self.sent, self.back = app, [], []

    def get_node_ids(self):
        return list(NODES)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            context = Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": NODES[node]},
                state=RecordDict(),
                run_config={},
            )
            try:
                reply = self.app(message, context)
            except Exception as error:  # as Flower's own client does
                reply = Message(Error(code=0, reason=repr(error)), reply_to=message)
            self.sent.append(message)
            self.back.append(reply)
            replies.append(reply)
        return replies

    run = property(lambda self: None)
    set_run = create_message = get_nodes = push_messages = pull_messages = lambda self, *a, **k: (
        None
    )


def start(
    tmp_path, strategy, rounds=2, *, broken=(), names=True, mods=(), evaluate_fn=None, **options
):
    data, parts, net = world()
    grid = InProcess(app(data, parts, net, names, broken, mods))
    initial = ArrayRecord(OrderedDict((k, v.clone()) for k, v in net.state_dict().items()))
    recorded = flower.record(
        strategy, tmp_path / "run", net, **{"data": data, "partition": parts, **options}
    )
    assert recorded is strategy
    result = recorded.start(
        grid=grid, initial_arrays=initial, num_rounds=rounds, evaluate_fn=evaluate_fn
    )
    return Run.open(tmp_path / "run"), grid, result, (data, parts, net)


def vector(net, arrays):
    state = arrays.to_torch_state_dict()
    return torch.cat([state[n].reshape(-1) for n, _ in net.named_parameters()])


def test_a_run_holds_what_went_over_the_wire(tmp_path):
    run, grid, result, (_, _, net) = start(
        tmp_path, FedAvg(), evaluate_fn=lambda t, a: MetricRecord({"mine": 10.0 + t})
    )
    assert run.rounds == [0, 1, 2] and run.status == "finished"
    trained = [m for m in grid.back if m.content.array_records]
    for t in (1, 2):
        c, replies = run.checkpoint(t), trained[3 * (t - 1) : 3 * t]
        assert c.client_ids == [0, 1, 2] and c.manifest["method"]["name"] == "fedavg"
        for reply in replies:
            k = NODES[reply.metadata.src_node_id]
            assert torch.equal(c.clients[k], vector(net, reply.content["arrays"]))
            state = reply.content["arrays"].to_torch_state_dict()
            assert torch.equal(c.buffers["1.running_mean"][k], state["1.running_mean"])
        sent = grid.sent[0 if t == 1 else 6].content[
            "arrays"
        ]  # rounds: three train, three evaluate messages
        assert torch.equal(c.received, vector(net, sent))
        mean = sum(n * w.double() for n, w in zip(SIZES, c.clients, strict=True)) / sum(SIZES)
        after = torch.cat([c.state[n].reshape(-1) for n, _ in net.named_parameters()])
        assert torch.allclose(after.double(), mean, atol=1e-6) and not torch.equal(
            after, c.received
        )
    final = result.arrays.to_torch_state_dict()
    assert all(torch.equal(run.checkpoint(2).state[n], final[n]) for n, _ in net.named_parameters())
    assert run.checkpoint(2).state["1.num_batches_tracked"].dtype == torch.int64
    assert (
        run.origin["examples"] == dict(enumerate(SIZES))
        and run.origin["names"][0] == "node 4000000007"
    )


def test_numbers_of_replies_averages_and_the_central_evaluation(tmp_path):
    run, grid, result, _ = start(
        tmp_path, FedAvg(), evaluate_fn=lambda t, a: MetricRecord({"mine": 10.0 + t})
    )
    frame = run.metrics

    def values(metric, **where):
        rows = frame[frame["metric"] == metric]
        for column, value in where.items():
            rows = rows[rows[column] == value]
        return rows["value"].tolist()

    assert values("mine") == [10.0, 11.0, 12.0]
    replies = {NODES[m.metadata.src_node_id]: m.content["metrics"]["loss"] for m in grid.back[:3]}
    assert values("loss", scope="client", round=1) == [
        replies[NODES[m.metadata.src_node_id]] for m in grid.back[:3]
    ]
    assert values("loss", scope="global", moment="trained", round=2) == [
        result.train_metrics_clientapp[2]["loss"]
    ]
    assert sorted(values("eval_acc", scope="client", round=1)) == [0.0, 0.25, 0.5]
    assert values("eval_acc", scope="global", round=1) == [
        pytest.approx((13 * 0.25 + 7 * 0.5) / 40)
    ]
    assert len(values("accuracy", slice="test")) == 2


def test_diagnostics_take_the_run(tmp_path):
    run, _, _, (data, _, net) = start(tmp_path, FedAvg())
    history = History.of(run, model=net, data=data)
    frame = fldiag.diagnose(history, "forgetting", min_count=1)
    own = frame[(frame["metric"] == "accuracy") & (frame["slice"] == "client:1/train")]
    assert set(own["moment"]) >= {"received", "trained"} and set(own["n_examples"].dropna()) == {13}
    assert not (frame["metric"] == "missing").any()
    recorded = run.metrics.query("metric == 'loss' and slice == 'test' and round == 2")[
        "value"
    ].item()
    again = frame.query(
        "metric == 'loss' and slice == 'test' and round == 2 and moment == 'aggregated'"
    )["value"].item()
    assert again == pytest.approx(recorded, rel=1e-6)


def test_without_a_partition_shares_are_by_the_examples_that_clients_report(tmp_path):
    run, _, _, (data, _, net) = start(tmp_path, FedAvg(), partition=None)
    history = History.of(run, model=net, data=data)
    assert history.weights([0, 2]) == pytest.approx([20 / 27, 7 / 27])
    frame = fldiag.diagnose(history, "account", slice="test", k=0)
    server = frame[
        (frame["estimator"] == "client")
        & (frame["scope"] == "global")
        & (frame["metric"] == "linear")
    ]
    assert abs(server["value"].item()) < 1e-5  # FedAvg's server adds nothing to the clients' shares
    with pytest.raises(FldiagError, match="which examples belong"):
        fldiag.diagnose(history, "account", slice="train", k=0)


def test_a_server_optimiser_is_no_average(tmp_path):
    run, _, _, (_, _, net) = start(tmp_path, FedAdam(eta=0.05), rounds=2)
    c = run.checkpoint(2)
    after = torch.cat([c.state[n].reshape(-1) for n, _ in net.named_parameters()])
    mean = sum(n * w.double() for n, w in zip(SIZES, c.clients, strict=True)) / sum(SIZES)
    assert (after - mean).abs().max() > 0.01 and after.dtype == torch.float32
    before = run.checkpoint(1).state
    assert torch.equal(
        c.received, torch.cat([before[n].reshape(-1) for n, _ in net.named_parameters()])
    )


class Ahead(FedAvg):
    """Sends another point than the global model; with ``apart``, another one to every client."""

    apart = False

    def configure_train(self, server_round, arrays, config, grid):
        for i, message in enumerate(super().configure_train(server_round, arrays, config, grid)):
            state = arrays.to_torch_state_dict()
            state["3.bias"] = state["3.bias"] + 1 + i * self.apart
            yield Message(
                RecordDict({"arrays": ArrayRecord(state), "config": config}),
                message.metadata.dst_node_id,
                "train",
            )


@pytest.mark.slow
def test_received_is_what_was_sent_and_not_what_the_server_holds(tmp_path):
    run, grid, *_ = start(tmp_path, Ahead())
    for t, first in ((1, 0), (2, 6)):
        c, before = run.checkpoint(t), run.checkpoint(t - 1)
        assert torch.equal(c.received, vector(world()[2], grid.sent[first].content["arrays"]))
        assert torch.allclose(c.received[-3:], before.state["3.bias"] + 1)
    strategy = Ahead()
    strategy.apart = True
    run, *_ = start(tmp_path / "b", strategy)
    assert run.checkpoint(1).received is None and any(
        "different weights" in note for note in run.origin["notes"]
    )


def test_a_round_without_replies_keeps_the_model(tmp_path):
    broken = set()

    def between(t, arrays):
        broken.clear()
        broken.update({0, 1, 2} if t == 1 else ())

    run, *_ = start(tmp_path, FedAvg(), 3, broken=broken, evaluate_fn=between)
    a, b = run.checkpoint(1), run.checkpoint(2)
    assert b.client_ids == [] and all(torch.equal(a.state[n], b.state[n]) for n in a.state)
    assert run.checkpoint(3).client_ids == [0, 1, 2] and any(
        "no new model" in note for note in run.origin["notes"]
    )


def test_a_failing_client_is_noted_and_the_others_recorded(tmp_path):
    run, *_ = start(tmp_path, FedAvg(), broken=(1,))
    assert run.checkpoint(2).client_ids == [0, 2]
    assert any("node 17 failed" in note and "battery" in note for note in run.origin["notes"])


def test_clients_that_do_not_say_who_they_are(tmp_path):
    with pytest.raises(FldiagError, match="partition-id"):
        start(tmp_path, FedAvg(), names=False)
    run, *_ = start(tmp_path / "b", FedAvg(), names=False, partition=None)
    c1, c2 = run.checkpoint(1), run.checkpoint(2)
    assert c1.client_ids == c2.client_ids == [0, 1, 2] and set(run.origin["names"].values()) == {
        f"node {n}" for n in NODES
    }


def test_a_client_mod_says_who_replied(tmp_path):
    run, *_ = start(tmp_path, FedAvg(), names=False, mods=[flower.mod])
    assert run.checkpoint(2).client_ids == [0, 1, 2] and run.origin["names"].keys() == {0, 1, 2}


def test_the_folder_has_an_owner_while_flower_trains(tmp_path):
    owners = []
    start(
        tmp_path,
        FedAvg(),
        evaluate_fn=lambda t, a: owners.append((tmp_path / "run" / "owner.json").exists()),
    )
    assert owners and all(owners) and not (tmp_path / "run" / "owner.json").exists()


def test_another_architecture_stops_the_first_round(tmp_path):
    data, parts, net = world()
    strategy = flower.record(
        FedAvg(), tmp_path / "run", nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    )
    with pytest.raises(FldiagError, match=r"0\.weight is \[5, 6\] there and \[4, 6\] in the model"):
        strategy.start(
            grid=InProcess(app(data, parts, net)),
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=1,
        )


def test_a_later_failure_costs_the_record_and_not_the_training(tmp_path, monkeypatch):
    from fldiag.runs import recording

    real = recording.Recording.add

    def full(self, t, *args, **options):
        if t == 2:
            raise FldiagError("no space left", "")
        return real(self, t, *args, **options)

    monkeypatch.setattr(recording.Recording, "add", full)
    with pytest.warns(UserWarning, match="round 2 is not recorded: no space left"):
        run, _, result, _ = start(tmp_path, FedAvg(), rounds=3)
    assert run.rounds == [0, 1, 3] and result.arrays is not None
    assert any("no space left" in note for note in run.origin["notes"])


def test_a_folder_in_use_is_refused_before_training(tmp_path):
    start(tmp_path, FedAvg(), rounds=1)
    with pytest.raises(FldiagError, match="already holds a run"):
        start(tmp_path, FedAvg(), rounds=1)
    with pytest.raises(FldiagError, match="not a Flower strategy"):
        flower.record(object(), tmp_path / "x", nn.Linear(1, 1))


@pytest.mark.slow
def test_the_example_is_a_file_that_runs_and_whose_run_is_diagnosed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    example = importlib.import_module("flower_digits")
    monkeypatch.setattr(
        sys.modules[__name__], "NODES", {100 + k: k for k in range(example.CLIENTS)}
    )
    example.serve(InProcess(example.client_app))
    run = fldiag.load(example.OUT)
    assert (
        run.status == "finished"
        and run.done == example.ROUNDS
        and run.about["config"]["model"]["name"] == "flower_digits:net"
    )
    with pytest.raises(FldiagError, match="--allow-code flower_digits:net"):
        fldiag.diagnose(run, "forgetting")
    table = fldiag.diagnose(run, "forgetting", model="flower_digits:net")
    assert set(table["client"].dropna()) == set(range(example.CLIENTS))
