"""Recording Flower: its own strategies, messages, records and client apps drive what is recorded; only the network
between server and clients is left out."""

import copy

import helpers
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from reference import value
from torch import nn

from fldiag import FldiagError
from fldiag.integrations import flower
from fldiag.runs.run import Run


@pytest.fixture(autouse=True)
def _task(monkeypatch):
    """Flower numbers messages by the task of the process, which its launcher sets."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


NODES = {4_000_000_007: 0, 17: 1, 900: 2}  # node id -> partition id
SIZES = (20, 13, 7)


def world():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return *helpers.classification(SIZES), net


def app(data, parts, module, names=True, broken=()):
    """A real client app: a step of SGD on the client's examples."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        k = context.node_config["partition-id"]
        if k in broken:
            raise RuntimeError("no battery")
        net = copy.deepcopy(module)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        net.train()
        x, y = data.normalise(data.train_x[parts[k]]), data.train_y[parts[k]]
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        metrics = {"num-examples": len(y), "loss": float(loss.detach())}
        metrics |= {"partition-id": k} if names else {}
        return Message(
            RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}),
            reply_to=message,
        )

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
            context = Context(1, node, {"partition-id": NODES[node]}, RecordDict(), {})
            try:
                replies.append(self.app(message, context))
            except Exception as error:  # as Flower's own client does
                replies.append(Message(Error(code=0, reason=repr(error)), reply_to=message))
        self.sent += messages
        self.back += replies
        return replies

    run = property(lambda self: None)
    set_run = create_message = get_nodes = push_messages = pull_messages = lambda self, *a, **k: (
        None
    )


def start(out, strategy, rounds=2, model=None, **options):
    data, parts, net = world()
    grid = InProcess(app(data, parts, net, **options))
    arrays = data.train_x, data.train_y, data.test_x, data.test_y
    recorded = flower.record(strategy, out, model or net, data=arrays, clients=parts)
    assert recorded is strategy
    strategy.fraction_evaluate = 0.0
    initial = ArrayRecord(copy.deepcopy(net.state_dict()))
    result = recorded.start(grid=grid, initial_arrays=initial, num_rounds=rounds)
    return Run.open(out), grid, result, net


def vector(net, arrays):
    state = arrays.to_torch_state_dict()
    return torch.cat([state[n].reshape(-1) for n, _ in net.named_parameters()])


class Halved(FedAvg):
    """Sends something else than it holds."""

    def configure_train(self, server_round, arrays, config, grid):
        half = {n: v / 2 for n, v in arrays.to_torch_state_dict().items()}
        return super().configure_train(server_round, ArrayRecord(half), config, grid)


def test_a_run_holds_what_went_over_the_wire(tmp_path):
    run, grid, result, net = start(tmp_path, Halved())
    assert run.rounds == [0, 1, 2] and run.status == "finished"
    trained = [m for m in grid.back if m.content.array_records]
    for t in (1, 2):
        c, replies = run.checkpoint(t), trained[3 * (t - 1) : 3 * t]
        assert c.client_ids == [0, 1, 2] and c.config["method"]["name"] == "halved"
        for reply in replies:
            k = NODES[reply.metadata.src_node_id]
            assert torch.equal(c.clients[k], vector(net, reply.content["arrays"]))
            state = reply.content["arrays"].to_torch_state_dict()
            assert torch.equal(c.buffers["1.running_mean"][k], state["1.running_mean"])
            loss = next(iter(reply.content.metric_records.values()))["loss"]
            assert value(run.metrics, "loss", round=t, client=k) == loss
        sent = grid.sent[3 * (t - 1)].content["arrays"]
        assert torch.equal(c.received, vector(net, sent))
    final = result.arrays.to_torch_state_dict()
    assert all(torch.equal(run.checkpoint(2).state[n], final[n]) for n, _ in net.named_parameters())
    assert run.checkpoint(2).state["1.num_batches_tracked"].dtype == torch.int64


def test_a_client_that_fails_is_left_out_and_a_round_without_replies_keeps_the_model(tmp_path):
    run, *_ = start(tmp_path / "a", FedAvg(), broken=(1,))
    assert run.checkpoint(2).client_ids == [0, 2]
    run, *_ = start(tmp_path / "b", FedAvg(), broken=(0, 1, 2), rounds=1)
    a, b = run.checkpoint(0), run.checkpoint(1)
    assert b.client_ids == [] and all(torch.equal(v, b.state[n]) for n, v in a.state.items())


def test_clients_that_do_not_say_who_they_are(tmp_path):
    with pytest.raises(FldiagError, match="partition-id"):
        start(tmp_path, FedAvg(), names=False)


def test_what_is_no_strategy_and_another_architecture_are_one_error(tmp_path):
    with pytest.raises(AttributeError, match="configure_train"):
        flower.record(object(), tmp_path / "run", nn.Linear(6, 3))
    assert not (tmp_path / "run").exists()
    with pytest.raises(FldiagError, match="model"):
        start(tmp_path, FedAvg(), model=nn.Linear(4, 3))
