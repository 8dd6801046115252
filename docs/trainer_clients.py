"""Three clients train a tiny BERT with transformers' Trainer, and fldiag records it: one file, complete.

With ``pip install 'fldiag[text]'``, from this folder:

    python trainer_clients.py
    fldiag forgetting runs/trainer --model trainer_clients:net
    fldiag spectrum runs/trainer --model trainer_clients:net --data trainer_clients:sentences
"""

import copy

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import fldiag

CLIENTS, ROUNDS = 3, 2


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            num_labels=2,
        )
    )


def sentences() -> dict[str, torch.Tensor]:
    """Made-up sentences: is the first word's number even?"""
    words = torch.randint(3, 50, (96, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[:, 0] % 2}


def main(out: str = "runs/trainer") -> None:
    model, batch = net(), sentences()
    rows = [{k: v[i] for k, v in batch.items()} for i in range(96)]
    args = TrainingArguments(
        "runs/tmp",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rec = fldiag.Recorder(
        out, model, data=batch, clients=[range(k, 96, CLIENTS) for k in range(CLIENTS)]
    )
    for _ in range(ROUNDS):
        received, trained = copy.deepcopy(model), []
        for k in range(CLIENTS):
            mine = copy.deepcopy(received)
            Trainer(mine, args, train_dataset=rows[k::CLIENTS]).train()
            rec.client(k, mine)
            trained.append(mine.state_dict())
        model.load_state_dict({n: torch.stack([s[n] for s in trained]).mean(0) for n in trained[0]})
        rec.round(aggregated=model)
    rec.close()


if __name__ == "__main__":
    main()
