"""FedSOL Figure 10: learning curves of eight methods on six data sets."""

from fldiag.figures import pictures
from fldiag.figures.paper_tables import trials
from fldiag.figures.study import Study, curve
from fldiag.plotting import curves, style, words


def draw(table):
    window = max(1, int(table["round"].max()) // 15)
    named, panels = table.drop(columns="slice").assign(metric=table["data"]), list(dict.fromkeys(table["data"]))
    figure = curves.draw(named, panels, smooth=window, chance=10, note=pictures.trained_on(table), width=style.TWO_COLUMNS)
    for ax, panel in zip(figure.axes, panels, strict=True):
        ax.set_title(f"protocol for {words.data(panel)}", fontsize=8)
        ax.set(ylabel=ax.get_ylabel().replace(words.metric(panel), "test accuracy"))
    return figure


STUDY = Study(
    title="Learning curves", source="FedSOL Figure 10",
    caption="Test accuracy over the rounds under LDA 0.1. With thirty rounds or more, lines are moving means over a fifteenth "
            "of the rounds, and raw curves are faint.",
    trials=trials("fedsol", "table2", where=lambda row: row.setting == "partition=lda;alpha=0.1"),
    ask=(curve(),), draw=draw)
