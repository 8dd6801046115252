"""State_dicts of other programs, folders of them, and runs made of rounds that another program trained."""

import json
import re

import helpers
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.config_files import read_partition
from fldiag.data import partition
from fldiag.integrations import client_files
from fldiag.models import state_dict
from fldiag.runs import schema, tensor_files
from fldiag.runs.index import write_index
from fldiag.runs.open_problem import open_problem
from fldiag.runs.recording import Recording, mean
from fldiag.runs.run import Run


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a
    )


# -- containers and names


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "optimizer": {"state": {}, "lr": 0.1}},
        lambda s: {"epoch": 1, "student": s},
        lambda s: {"model": {"state_dict": s}, "args": {"a": torch.ones(1)}},
        lambda s: {"ema": s | {"0.bias": s["0.bias"] + 1}, "state_dict": s},
    ],
)
def test_state_dicts_in_containers(tmp_path, wrap):
    state = dict(net().state_dict())
    torch.save(wrap(state), tmp_path / "a.pt")
    assert same(schema.read(tmp_path / "a.pt").state, state)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, "several sets of weights: a, b"),
        ({}, "empty dict"),
        ({"epoch": 3}, "'epoch' is a int"),
        (torch.ones(3, 2), "holds a Tensor"),
        ({"model": {"lr": 0.1}}, "'model' is a dict"),
    ],
)
def test_what_is_no_state_dict_is_said(tmp_path, content, expected):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(FldiagError, match=expected):
        schema.read(tmp_path / "a.pt")


@pytest.mark.parametrize("prefix", ["module.", "model.", "model._orig_mod.", "net.backbone."])
def test_prefixes_are_stripped_when_that_makes_the_names_fit(prefix):
    state = dict(net().state_dict())
    found, said = state_dict.fit(
        {prefix + k: v for k, v in state.items()} | {"loss.weight": torch.ones(3)}, net(1)
    )
    assert said == prefix and same(found, state)
    assert state_dict.fit(state, net(1))[1] == ""


def test_a_model_whose_own_names_begin_with_the_prefix_keeps_them():
    wrapped = nn.ModuleDict({"module": net()})
    state = dict(wrapped.state_dict())
    assert state_dict.fit(state, wrapped)[1] == "" and same(
        state_dict.fit(state, wrapped)[0], state
    )
    assert list(state_dict.fit(state, net())[0]) == [n for n, _ in net().named_parameters()] + [
        n for n, _ in net().named_buffers()
    ]


def test_two_models_in_one_state_dict_are_not_guessed_between():
    state = net().state_dict()
    with pytest.raises(FldiagError, match=r"'left\.', 'right\.'"):
        state_dict.fit({p + k: v for p in ("right.", "left.") for k, v in state.items()}, net())


# -- several sets of weights in one file

TRAINED, AVERAGED = dict(net(1).state_dict()), dict(net(2).state_dict())
OPTIMISER = {
    "state": {0: {"exp_avg": torch.ones(400)}},
    "param_groups": [{"lr": 0.1, "params": [0]}],
}


def behind(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


#: name -> content, key of the trained weights and of the others.
SETS = {
    "two entries": (
        {"model": TRAINED, "model_ema": AVERAGED, "optimizer": OPTIMISER, "epoch": 3},
        "model",
        "model_ema",
    ),
    "two state_dicts": (
        {"state_dict_ema": AVERAGED, "state_dict": TRAINED},
        "state_dict",
        "state_dict_ema",
    ),
    "the average first": ({"ema": AVERAGED, "net": TRAINED}, "net", "ema"),
    "stochastic averaging": (
        {
            "model": TRAINED,
            "swa_model": {"n_averaged": torch.tensor(2), **behind("module.", AVERAGED)},
        },
        "model",
        "swa_model",
    ),
    "nested": (
        {
            "model": {"state_dict": TRAINED, "ema_state_dict": AVERAGED},
            "args": {"a": torch.ones(1)},
        },
        "model.state_dict",
        "model.ema_state_dict",
    ),
    "parallel": (
        {"model": behind("module.", TRAINED), "model_ema": behind("module.", AVERAGED)},
        "model",
        "model_ema",
    ),
    "the best so far": ({"model": TRAINED, "best_model": AVERAGED}, "model", "best_model"),
}


def problem_of(path, **options):
    x = torch.linspace(-1, 1, 40).sin().reshape(10, 4)
    checkpoint = fldiag.load(path, model=net(), data=(x, torch.arange(10) % 3), **options)
    return open_problem(checkpoint)


def weights(state):
    return torch.cat([state[name].reshape(-1) for name, _ in net().named_parameters()])


@pytest.mark.parametrize("name", SETS)
def test_of_several_sets_the_trained_one_is_read_with_a_word_and_key_chooses(tmp_path, name):
    content, trained, averaged = SETS[name]
    torch.save(content, tmp_path / "a.pt")
    problem = problem_of(tmp_path / "a.pt")
    assert torch.equal(problem.w, weights(TRAINED)) and torch.equal(
        problem.buffers["1.running_var"], TRAINED["1.running_var"]
    )
    assert (
        f"{trained or 'the one without a name'} is read, and {averaged} is not"
        in problem.remarks[0]
    )
    other = problem_of(tmp_path / "a.pt", key=averaged)
    assert torch.equal(other.w, weights(AVERAGED)) and not any(
        "several sets" in text for text in other.remarks
    )
    if trained:
        assert torch.equal(problem_of(tmp_path / "a.pt", key=trained).w, weights(TRAINED))
    table = fldiag.diagnose(
        tmp_path / "a.pt",
        "spectrum",
        k=1,
        model=net(),
        data=(torch.ones(3, 4), torch.arange(3)),
        key=averaged,
    )
    assert set(table["run"]) == {f"a {averaged}"}


def test_a_set_that_only_looks_like_one_is_passed_over_silently_and_a_list_of_tensors_is_not(
    tmp_path,
):
    torch.save(
        {
            "model": TRAINED,
            "optimizer": OPTIMISER,
            "args": {"a": torch.ones(1)},
            "stats": torch.ones(3),
        },
        tmp_path / "a.pt",
    )
    assert (
        problem_of(tmp_path / "a.pt").remarks == [] and fldiag.load(tmp_path / "a.pt").label == "a"
    )
    torch.save(
        {"model": TRAINED, "ema": {"decay": 0.9, "shadow_params": list(AVERAGED.values())}},
        tmp_path / "b.pt",
    )
    assert "model is read, and ema is not" in problem_of(tmp_path / "b.pt").remarks[0]


@pytest.mark.parametrize(
    "content",
    [
        {"model_1": TRAINED, "model_2": AVERAGED},
        {"generator": TRAINED, "discriminator": AVERAGED},
        {"state_dict": TRAINED, "model": AVERAGED},
        {"ema_fast": TRAINED, "ema_slow": AVERAGED},
        {**behind("left.", TRAINED), **behind("right.", AVERAGED)},
        {"best": {"model": TRAINED}, "last": {"model": AVERAGED}},
    ],
)
def test_equal_sets_are_refused_and_the_remedy_works(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(FldiagError) as caught:
        problem_of(tmp_path / "a.pt")
    key = re.search(r"--key (\S+) ", caught.value.remedy)[1]
    assert any(
        torch.equal(problem_of(tmp_path / "a.pt", key=key).w, weights(state))
        for state in (TRAINED, AVERAGED)
    )


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        (
            {"model": TRAINED, "model_ema": AVERAGED},
            "model_emma",
            "no set of weights 'model_emma'; did you mean 'model_ema'? known: model, model_ema",
        ),
        (
            {"model": TRAINED, "optimizer": OPTIMISER},
            "optimizer",
            "no set of weights 'optimizer'; known: model",
        ),
        (TRAINED, "ema", "no set of weights 'ema'; known: 0, 1, 3"),
    ],
)
def test_a_wrong_key_names_the_sets(tmp_path, content, key, message):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(FldiagError, match=re.escape(message)):
        fldiag.load(tmp_path / "a.pt", key=key)


def test_a_key_has_no_meaning_for_checkpoints_and_runs_of_fldiag(tmp_path):
    checkpoint(tmp_path / "a.pt")
    with pytest.raises(FldiagError, match="leave it out"):
        fldiag.load(tmp_path / "a.pt", key="model")
    recorded(tmp_path / "r")
    with pytest.raises(FldiagError, match="is a run; leave it out"):
        fldiag.load(tmp_path / "r", key="model")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda s: s.update({"0.weight": torch.ones(5, 4)}),
            r"0\.weight is \[5, 4\] there and \[3, 4\] in the model",
        ),
        (lambda s: s.pop("3.bias"), r"it lacks 3\.bias"),
        (lambda s: s.update({"4.bias": torch.ones(3)}), r"the model has no 4\.bias"),
        (lambda s: s.pop("1.running_var"), r"lacks 1\.running_var"),
    ],
)
def test_misfits_name_the_tensor(edit, expected):
    state = dict(net().state_dict())
    edit(state)
    with pytest.raises(FldiagError, match=expected):
        state_dict.fit(state, net())
    state = dict(net().state_dict())
    del state["1.num_batches_tracked"]
    assert len(state_dict.fit(state, net())[0]) == len(state)


def test_a_plain_checkpoint_with_a_prefix_is_diagnosed_and_that_is_said(tmp_path):
    model, data = nn.Linear(4, 3), (torch.randn(8, 4), torch.arange(8) % 3)
    torch.save({"module." + k: v for k, v in model.state_dict().items()}, tmp_path / "dp.pt")
    problem = open_problem(fldiag.load(tmp_path / "dp.pt", model=nn.Linear(4, 3), data=data))
    assert problem.remarks == ["dp.pt: the names fit the model without 'module.' before them"]
    assert torch.equal(problem.w, torch.cat([model.weight.flatten(), model.bias]).detach())


# -- safetensors that keep a checkpoint


def checkpoint(path):
    w = torch.randn(3, 27)
    schema.write(
        path,
        {
            "round": 2,
            "seed": 1,
            "config": {},
            "method": {"name": "x"},
            "shape": [4],
            "classes": 3,
            "clients": [4, 7],
        },
        {"b": torch.ones(2, dtype=torch.bfloat16), "a/b": torch.tensor(3), "z": w[0, :4].double()},
        received=w[0],
        clients=w[1:],
        buffers={},
    )
    return torch.load(path, weights_only=True)


def test_flat_and_back_is_the_same(tmp_path):
    content = checkpoint(tmp_path / "a.pt")
    tensors, metadata = tensor_files.flatten(content)
    back = tensor_files.unflatten(dict(reversed(tensors.items())), metadata)
    assert (
        list(back) == list(content)
        and list(back["model"]) == list(content["model"])
        and back["manifest"] == content["manifest"]
    )
    assert (
        same(back["model"], content["model"])
        and torch.equal(back["clients"], content["clients"])
        and back["buffers"] == {}
    )


def test_tied_tensors_are_kept_twice_and_sparse_ones_refused():
    w = torch.randn(3)
    tensors, metadata = tensor_files.flatten({"a": w, "b": w, "c": w[:2]})
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 3 and torch.equal(
        tensors["b"], w
    )
    assert tensor_files.MANIFEST not in metadata
    with pytest.raises(FldiagError, match="s is a sparse_coo tensor"):
        tensor_files.flatten({"s": w.to_sparse()})


@pytest.mark.parametrize("order", ["[[", "3", '[["model", "gone"]]', '[["model"], 4]'])
def test_edited_metadata(tmp_path, order):
    from safetensors.torch import save_file

    save_file(
        {"model/a": torch.ones(2)},
        tmp_path / "a.safetensors",
        {tensor_files.MANIFEST: "{}", tensor_files.ORDER: order},
    )
    with pytest.raises(FldiagError, match="manifest does not fit"):
        schema.read(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "manifest", ['{"schema": 1e999}', '{"schema": []}', "[" * 5000, "null", '{"schema": NaN}']
)
def test_a_manifest_written_by_hand_is_an_error(tmp_path, manifest):
    from safetensors.torch import save_file

    save_file(
        {"model/a": torch.ones(2)},
        tmp_path / "a.safetensors",
        {tensor_files.MANIFEST: manifest, tensor_files.ORDER: '[["manifest"], ["model", "a"]]'},
    )
    with pytest.raises(FldiagError, match="its manifest is not valid"):
        schema.read(tmp_path / "a.safetensors")


# -- folders


def test_patterns():
    match = client_files.pattern("r{round}/site-{client}_*.pt").fullmatch(
        "r012/site-a_b.c_final.pt"
    )
    assert match and match["round"] == "012" and match["client"] in ("a", "a_b.c")
    assert not client_files.pattern("r{round}/{client}.pt").fullmatch(
        "r1/x/y.pt"
    )  # a client is no folder
    assert not client_files.pattern("a.pt").fullmatch("aXpt")
    for wrong in ("{client}/{clinet}.pt", "{client}/{client}.pt"):
        with pytest.raises(FldiagError, match="pattern"):
            client_files.pattern(wrong)


def tree(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_scan_tells_clients_from_globals(tmp_path):
    tree(
        tmp_path,
        [
            "round_1/0.pt",
            "round_1/10.pt",
            "round_1/2.pt",
            "round_1/global.pt",
            "round_2/0.pt",
            "notes.txt",
        ],
    )
    layout = client_files.scan(tmp_path, "round_{round}/{client}.pt", "round_{round}/global.pt")
    assert (
        layout.rounds == [1, 2] and layout.names == ["0", "2", "10"] and list(layout.globals) == [1]
    )
    assert "global" in client_files.scan(tmp_path, "round_{round}/{client}.pt").names
    assert client_files.scan(tmp_path / "round_1", "{client}.pt", "global.pt").rounds == [1]
    tree(tmp_path, ["round_01/0.pt"])
    with pytest.raises(FldiagError, match=r"round_01/0\.pt and round_1/0\.pt are both client 0"):
        client_files.scan(tmp_path, "round_{round}/{client}.pt")


def test_a_pattern_that_matches_nothing_says_what_is_there(tmp_path):
    with pytest.raises(FldiagError, match="the folder is empty"):
        client_files.scan(tmp_path, "{client}.pt")
    tree(tmp_path, ["it3/worker12.safetensors"])
    with pytest.raises(FldiagError, match=r"it holds it3/worker12\.safetensors"):
        client_files.scan(tmp_path, "round_{round}/client_{client}.pt")
    right = "it{round}/worker{client}.safetensors"
    assert client_files.scan(tmp_path, right).clients == {
        3: {"12": tmp_path / "it3/worker12.safetensors"}
    }
    with pytest.raises(FldiagError, match="global pattern"):
        client_files.scan(tmp_path, right, "it{round}/global.pt")
    with pytest.raises(FldiagError, match="no folder"):
        client_files.scan(tmp_path / "gone", right)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["1", "2", "10"], {"1": 1, "2": 2, "10": 10}),
        (["01", "02"], {"01": 1, "02": 2}),
        (["b", "a10", "a9"], {"a9": 0, "a10": 1, "b": 2}),
        (["7", "123456789012"], {"7": 0, "123456789012": 1}),
    ],
)
def test_client_numbers(names, expected):
    assert client_files.numbers(names) == expected


def test_partitions_of_all_kinds(tmp_path):
    parts = [np.array([3, 1]), np.array([], dtype=np.int64), np.array([0, 2])]
    (tmp_path / "a.json").write_text(json.dumps([p.tolist() for p in parts]))
    (tmp_path / "b.json").write_text(
        json.dumps({f"client_{k}": p.tolist() for k, p in enumerate(parts)})
    )
    np.savez(tmp_path / "c.npz", **{str(k): p.astype(np.int32) for k, p in enumerate(parts)})
    partition.save(tmp_path / "d.npz", parts)
    for name in ("a.json", "b.json", "c.npz", "d.npz"):
        found, lacking = client_files.match(read_partition(tmp_path / name), ["0", "1", "2"])
        assert [found[str(k)].tolist() for k in range(3)] == [
            [1, 3],
            [],
            [0, 2],
        ] and lacking == [], name
        assert found["0"].dtype == np.int64


@pytest.mark.parametrize(
    "text",
    ["[", "3", '{"0": [0.5]}', '{"0": "abc"}', '{"0": [-1]}', "{}", '{"0": [[1]]}', '{"0": 4}'],
)
def test_what_is_no_partition(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(FldiagError, match=r"p\.json"):
        read_partition(tmp_path / "p.json")


def test_a_partition_with_pickled_objects_is_not_read(tmp_path):
    np.savez(tmp_path / "p.npz", **{"0": np.array([{}], dtype=object)})
    with pytest.raises(FldiagError, match="not a partition"):
        read_partition(tmp_path / "p.npz")


def test_names_of_the_partition_and_of_the_files():
    a = np.array([0])
    assert client_files.match({"site-3": a, "site-4": a}, ["3", "04"])[0].keys() == {"3", "04"}
    assert client_files.match({"3": a}, ["site-3", "site-5"]) == ({"site-3": a}, ["site-5"])
    assert client_files.match({"0": a, "9": a}, ["0"])[0].keys() == {
        "0",
        "9",
    }  # a client that never took part keeps its examples
    with pytest.raises(FldiagError, match="twice"):
        client_files.match({"3": a, "client_3": a}, ["3"])
    with pytest.raises(FldiagError, match="x, y"):
        client_files.match({"x": a, "y": a}, ["0", "1"])
    with pytest.raises(FldiagError, match="client 0 has example 5"):
        client_files.check({"0": np.array([1, 5])}, 5, "iris")


# -- recorded runs


def test_mean_is_weighted_in_double_and_counters_take_the_largest():
    states = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([4.0, 8.0]), "n": torch.tensor(7)},
    ]
    found = mean(states, [1, 2])
    assert (
        torch.equal(found["w"], torch.tensor([3.0, 6.0]))
        and found["w"].dtype == torch.float32
        and int(found["n"]) == 7
    )
    assert torch.equal(mean(states, [0, 0])["w"], torch.tensor([2.5, 5.0]))


def recorded(path, rounds=2, **options):
    data, parts = helpers.classification((20, 13, 7), 4)
    recording = Recording(
        path,
        net(),
        dataset=data,
        origin={"kind": "test"},
        **{"parts": dict(enumerate(parts)), "method": "theirs", **options},
    )
    recording.initial(net(9).state_dict())
    before = net(9).state_dict()
    for t in range(1, rounds + 1):
        clients = {k: net(10 * t + k).state_dict() for k in (2, 0)}
        after = mean([clients[0], clients[2]], [20, 7])
        recording.add(
            t, after, clients, before, rows=[{"metric": "m", "scope": "global", "value": float(t)}]
        )
        before = after
    return recording, data, parts


def test_a_recorded_run_reads_as_it_was_written(tmp_path):
    recording, _, parts = recorded(tmp_path / "r")
    assert Run.open(tmp_path / "r").status == "interrupted"
    recording.finish()
    run = Run.open(tmp_path / "r")
    assert (run.status, run.done, run.rounds) == ("finished", 2, [0, 1, 2])
    c = run.checkpoint(2)
    assert c.client_ids == [0, 2] and c.label == "theirs round 2"
    assert torch.equal(c.clients[1], torch.cat([p.reshape(-1) for p in net(22).parameters()]))
    assert torch.equal(c.buffers["1.running_mean"][0], net(20)[1].running_mean)
    assert run.metrics.query("metric == 'm'")["value"].tolist() == [1.0, 2.0]
    stored = partition.load_parts(run.verified("partition.npz"))
    assert all(map(np.array_equal, stored, parts))
    with pytest.raises(FldiagError, match="another program"):
        _ = run.config


def test_an_interrupted_recording_goes_on_and_another_is_refused(tmp_path):
    recorded(tmp_path / "r", rounds=1)
    again, *_ = recorded(tmp_path / "r", rounds=0)
    again.add(2, net(5).state_dict(), {}, None)
    run = again.finish()
    assert run.rounds == [0, 1, 2] and set(run.metrics["round"]) == {1, 2}
    with pytest.raises(FldiagError, match="already holds a run"):
        recorded(tmp_path / "r")


def test_what_was_not_known_is_said_when_it_is_asked_for(tmp_path):
    recording, data, _ = recorded(tmp_path / "r", parts=None)
    recording.note("the third client was ill")
    run = recording.finish()
    with pytest.raises(FldiagError, match="does not say which data"):
        open_problem(run)
    with pytest.raises(FldiagError, match="does not say which model"):
        open_problem(fldiag.load(run.path / "rounds" / "0002.pt", data=data))
    given = fldiag.load(run.path / "rounds" / "0002.pt", data=data, model=net())
    assert open_problem(given, client=2).n == 40
    with pytest.raises(FldiagError, match="needs a partition"):
        open_problem(given, slice="client:0")
    history = fldiag.runs.history.History.of(run, model=net(), data=data)
    notes = (
        fldiag.diagnose(history, "forgetting", min_count=1)
        .query("metric == 'missing'")["note"]
        .tolist()
    )
    assert "the third client was ill" in notes and any("which examples belong" in n for n in notes)
    with pytest.raises(FldiagError, match="which examples belong"):
        fldiag.diagnose(history, "matching")


def test_statistics_that_the_first_clients_received_are_those_of_the_initial_model(tmp_path):
    recording, data, _ = recorded(tmp_path / "r", rounds=0)
    start = net(9)
    start[1].running_mean += 3
    recording.initial(start.state_dict())
    recording.add(1, net(1).state_dict(), {0: net(2).state_dict()}, start.state_dict())
    history = fldiag.runs.history.History.of(recording.finish(), model=net(), data=data)
    (first,) = [s for s in history.each() if s.round == 1]
    assert torch.equal(first.received_buffers["1.running_mean"], start[1].running_mean)
    assert not [n for n in history.notes if n["round"] == 0]


@pytest.mark.parametrize(
    "edit",
    [lambda o: o.update(notes=3), lambda o: o.update(examples={"a": 1}), lambda o: o.pop("recipe")],
)
def test_edited_origin(tmp_path, edit):
    recording, *_ = recorded(tmp_path / "r", rounds=1)
    recording.finish()
    index = json.loads((tmp_path / "r" / "run.json").read_text())
    edit(index["origin"])
    write_index(tmp_path / "r", index)
    with pytest.raises(FldiagError, match="origin is not valid"):
        _ = Run.open(tmp_path / "r").origin


def test_a_folder_with_other_files_is_not_made_a_run(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "mine.csv").write_text("precious")
    with pytest.raises(FldiagError, match="holds other files"):
        Recording(tmp_path, torch.nn.Linear(2, 2), origin={"kind": "test"})
    assert (tmp_path / "metrics" / "mine.csv").read_text() == "precious" and not (
        tmp_path / "run.json"
    ).exists()


_NAMES = st.sampled_from(["manifest", "model", "w", "", 3, None])


@given(
    st.recursive(_NAMES, lambda inner: st.lists(inner, max_size=3), max_leaves=12)
    | st.just("[" * 5000)
)
def test_an_order_that_somebody_wrote_by_hand_is_content_or_a_value_error(order):
    text = order if isinstance(order, str) and order.startswith("[") else json.dumps(order)
    try:
        content = tensor_files.unflatten(
            {"w": torch.ones(2), "model/w": torch.ones(3)},
            {tensor_files.MANIFEST: "{}", tensor_files.ORDER: text},
        )
    except ValueError as error:
        assert "does not fit its tensors" in str(error)
    else:
        assert isinstance(content, dict)
