"""FedSOL Figure 2: which client holds how much of which class."""

from fldiag.figures.study import Study, Trial, partition
from fldiag.plotting import partition as bubbles

FEW = {"clients.total": 10}


def draw(table):
    return bubbles.draw(table.rename(columns={"index": "class", "value": "count"}))


STUDY = Study(
    title="Sharding and LDA partitions", source="FedSOL Figure 2",
    caption="Examples of every class and client: two shards a client, and LDA with concentration 0.1.",
    trials=(Trial("fedsol-cifar10-shard2", over=FEW, label="sharding, 2 shards", train=False),
            Trial("fedsol-cifar10-lda0.1", over=FEW, label="LDA 0.1", train=False)),
    ask=(partition(),), draw=draw)
