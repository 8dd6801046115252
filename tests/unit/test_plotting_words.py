"""Display names: one for every registered method, and only where a word is a method's name."""

from fldiag import catalogue
from fldiag.plotting import style, words


def test_every_method_has_a_display_name_and_no_name_is_invented():
    assert set(words.METHODS) == set(catalogue("methods"))
    assert len(set(words.METHODS.values())) == len(words.METHODS)


def test_labels_get_display_names_and_symbols_but_paths_and_words_stay():
    assert (
        words.label("fedavg round 10") == "FedAvg round 10"
        and words.label("run-fedlesam_d, rho=0.5") == "run-FedLESAM-D, ρ = 0.5"
    )
    for text in ("my_fedavg_thing", "fedavgx", "strategy", "the rho of it", "moon", "conv1.weight"):
        assert words.label(text) == text
    assert style.plain("fedsol $x$") == r"FedSOL \$x\$"
