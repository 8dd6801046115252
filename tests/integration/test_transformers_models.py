"""Models of transformers: their folders as checkpoints, batches as dicts, their own losses."""

import json

import pytest
import torch
import transformers

import fldiag

TOKENS = torch.randint(3, 20, (6, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS).tril(1)  # sentences of 2 to 7 words
LABELS = TOKENS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}
MODELS = {
    "BertForMaskedLM": BATCH,
    "LlamaForCausalLM": BATCH,
    "BertForSequenceClassification": BATCH | {"labels": torch.arange(6) % 2},
}


def model(name):
    torch.manual_seed(1)
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=16,
    )
    return kind(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_own_loss_in_any_batches_and_its_folder_is_a_checkpoint(name):
    net, batch = model(name), MODELS[name]
    net.save_pretrained("folder")
    # transformers takes the loss of causal models in single precision, whatever the model's
    rough = 1e5 if "Causal" in name else 1.0
    loss = net.double()(**batch)["loss"]
    loss.backward()
    expected, gradient = loss.item(), torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    for bounds in ([(0, 6)], [(i, i + 1) for i in range(6)]):
        p = fldiag.Problem(model(name), lambda out, _: out.loss, batch, dtype=torch.float64)
        p.__dict__["bounds"] = bounds
        assert p.loss()[0] == pytest.approx(expected, rel=1e-11 * rough)
        assert torch.allclose(p.gradient(), gradient, rtol=1e-9 * rough, atol=1e-12 * rough)
    stored = fldiag.load("folder", data=batch)
    table = fldiag.diagnose(stored, "spectrum", k=1, precision="fp64")
    assert table["value"][0] == pytest.approx(expected, rel=1e-6) and table["run"][0] == "folder"


def test_code_in_a_folder_is_never_run(tmp_path):
    ran = tmp_path / "ran"
    model("BertForMaskedLM").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.M"}
    for change in ({"model_type": "evil"}, {"architectures": ["Evil"]}):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(fldiag.FldiagError, match=r"never run|no class"):
            fldiag.diagnose(fldiag.load(tmp_path, data=BATCH), "spectrum", k=1)
    assert not ran.exists()
