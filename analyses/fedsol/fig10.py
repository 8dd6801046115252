"""FedSOL Figure 10: learning curves of eight methods on six data sets."""

from fldiag.figures.paper_tables import trials
from fldiag.figures.pictures import stand_ins
from fldiag.figures.study import Study, curve
from fldiag.plotting import curves


def draw(table):
    window = max(1, int(table["round"].max()) // 15)
    here = {name: f"\n(here {other})" for name, other in stand_ins(table).items()}
    named = table.drop(columns="slice").assign(metric=[f"accuracy on {d}{here.get(d, '')}" for d in table["data"]])
    return curves.draw(named, list(dict.fromkeys(named["metric"])), smooth=window, width=6.9)


STUDY = Study(
    title="Learning curves", source="FedSOL Figure 10",
    caption="Test accuracy over the rounds under LDA 0.1 (of thirty rounds and more: moving mean over a fifteenth of them, raw "
            "curves faint).",
    trials=trials("fedsol", "table2", where=lambda row: row.setting == "partition=lda;alpha=0.1"),
    ask=(curve(),), draw=draw)
