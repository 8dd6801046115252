"""FedSOL Table 9: the clients' own models after fine-tuning."""

from fldiag_papers import pictures
from fldiag_papers.paper_tables import with_values
from fldiag_papers.reported import rows
from fldiag_papers.study import Study, Trial, personal

#: One training of 200 epochs for local models; minibatches that are halved into the paper's.
OWN = {
    "local_only": {
        "rounds": 200,
        "clients.per_round": 100,
        "train.epochs": 1,
        "train.keep_momentum": True,
    },
    "perfedavg": {"train.batch_size": 100, "train.epochs": 2},
}


def draw(table):
    return pictures.dots(table[table["metric"] == "personal_accuracy"])


def trial(row):
    over = dict(OWN.get(row.method, {}))
    if row.method == "local_only" and row.data == "tissuemnist":
        over["clients.per_round"] = 200
    epochs = int(row.settings.get("tune_epochs", 0))
    return with_values(
        Trial(
            f"fedsol-{row.data}-lda0.1",
            row.method,
            over,
            setting=row.setting,
            ask=(personal(epochs),),
        )
    )


STUDY = Study(
    title="Personalised models",
    source="FedSOL Table 9",
    caption="Accuracy of the clients' models in percent, each on test examples of its own mixture of classes, after 1 and 5 "
    "epochs of fine-tuning: mean over the clients, and in the table their standard deviation (_std).",
    trials=tuple(
        trial(r) for r in rows("fedsol") if r.id == "table9" and r.metric == "personal_accuracy"
    ),
    pick={m: {"metric": m} for m in ("personal_accuracy", "personal_accuracy_std")},
    draw=draw,
    layout=pictures.cells,
)
