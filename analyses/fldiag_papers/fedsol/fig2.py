"""FedSOL Figure 2: which client holds how much of which class."""

from fldiag.plotting import words
from fldiag.plotting.partition import draw_counts
from fldiag_papers.study import Study, Trial, partition

FEW = {"clients.total": 10}


def draw(table):
    title = f"{words.data(table['trained_on'].iloc[0])}, {table['client'].nunique()} clients"
    return draw_counts(table.rename(columns={"index": "class", "value": "count"}), title=title)


STUDY = Study(
    title="Sharding and LDA partitions",
    source="FedSOL Figure 2",
    caption="Number of examples per class and client: two shards per client, and LDA with concentration 0.1.",
    trials=(
        Trial("fedsol-cifar10-shard2", over=FEW, label="sharding, 2 shards", train=False),
        Trial("fedsol-cifar10-lda0.1", over=FEW, label="LDA 0.1", train=False),
    ),
    ask=(partition(),),
    draw=draw,
)
