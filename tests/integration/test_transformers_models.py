"""Models of transformers: their folders as checkpoints, batches as dicts, their own losses."""

import json

import pytest
import torch

import fldiag
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem

transformers = pytest.importorskip("transformers")
N, T, V = 6, 7, 20
SMALL = {
    "vocab_size": V,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,
}
torch.manual_seed(0)
TOKENS = torch.randint(3, V, (N, T))
MASK = (torch.arange(T) < torch.tensor([7, 5, 3, 7, 2, 6])[:, None]).long()
LABELS = TOKENS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}


def bert(kind, **more):
    torch.manual_seed(1)
    return getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**SMALL, **more)).eval()


def gpt():
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    ).eval()


def llama():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1)
    ).eval()


MODELS = {
    "masked": (lambda: bert("ForMaskedLM"), BATCH, "the mean over the labels that count"),
    "causal": (gpt, BATCH, "labels after the first"),
    "rotary": (llama, BATCH, "labels after the first"),
    "classes": (
        lambda: bert("ForSequenceClassification", num_labels=3),
        {**BATCH, "labels": torch.arange(N) % 3},
        "examples",
    ),
    "multi-label": (
        lambda: bert(
            "ForSequenceClassification", num_labels=3, problem_type="multi_label_classification"
        ),
        {**BATCH, "labels": torch.rand(N, 3).round()},
        "examples",
    ),
    "tagged": (
        lambda: bert("ForTokenClassification", num_labels=V),
        BATCH,
        "the mean over the labels that count",
    ),
}


#: Whose losses transformers takes in single precision, whatever the model's.
SINGLE = {"causal", "rotary", "multi-label"}


@pytest.mark.parametrize("name", MODELS)
def test_the_own_loss_of_a_model_is_that_of_all_examples_in_any_batches(name, tmp_path):
    make, batch, told = MODELS[name]
    net, rough = make().double(), 1e5 if name in SINGLE else 1.0
    expected = net(**batch)["loss"]
    expected.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    for bounds in ([(0, N)], [(i, i + 1) for i in range(N)]):
        p = Problem(make(), lambda out, batch: out.loss, batch, dtype=torch.float64)
        p.__dict__["bounds"] = bounds
        assert (
            p.loss()[0] == pytest.approx(float(expected.detach()), rel=1e-11 * rough)
            and told in p.remarks[-1]
        )
        assert torch.allclose(p.gradient(), gradient, rtol=1e-9 * rough, atol=1e-12 * rough)
        v = torch.randn(len(p.w), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        step = (1e-2 if name in SINGLE else 1e-5) / v.norm()
        product = (p.gradient(p.w + step * v) - p.gradient(p.w - step * v)) / (2 * step)
        assert float((p.hvp(v) - product).norm() / product.norm()) < (
            2e-3 if name in SINGLE else 1e-6
        )


@pytest.mark.parametrize("name", ["masked", "causal", "classes"])
def test_a_folder_is_a_checkpoint(name, tmp_path):
    make, batch, _ = MODELS[name]
    net = make()
    net.save_pretrained(
        tmp_path / "folder", **({"max_shard_size": "2KB"} if name == "masked" else {})
    )
    table = fldiag.diagnose(
        fldiag.load(tmp_path / "folder", data=batch), "spectrum", k=1, precision="fp64"
    )
    net.double()
    assert table["value"][0] == pytest.approx(float(net(**batch)["loss"].detach()), rel=1e-6)
    assert table["run"][0] == "folder" and table["converged"].dropna().all()


def test_a_tokenized_data_set_is_drawn(tmp_path):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return {k: v[i].tolist() for k, v in MODELS["classes"][1].items()}

    make, batch, _ = MODELS["classes"]
    loader = torch.utils.data.DataLoader(
        Rows(),
        batch_size=4,
        collate_fn=lambda rows: transformers.BatchEncoding(
            {k: torch.tensor([r[k] for r in rows]) for k in rows[0]}
        ),
    )
    own = lambda out, batch: out.loss  # noqa: E731
    assert Problem(make(), own, loader).loss() == Problem(make(), own, batch).loss()


def test_code_in_a_folder_is_never_run(tmp_path):
    net, ran = bert("ForMaskedLM"), tmp_path / "ran"
    net.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for change, message in (
        (
            {
                "model_type": "evil",
                "auto_map": {"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.M"},
            },
            "never run",
        ),
        (
            {
                "auto_map": {"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.M"},
                "architectures": ["Evil"],
            },
            "no class|never run",
        ),
        ({"architectures": ["PreTrainedTokenizerFast"]}, "has no class"),
        ({"architectures": []}, "does not name"),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(FldiagError, match=message):
            fldiag.diagnose(fldiag.load(tmp_path / "m", data=BATCH), "spectrum", k=1)
    assert not ran.exists()
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(FldiagError, match=r"is not a file"):
        fldiag.load(tmp_path / "m")
