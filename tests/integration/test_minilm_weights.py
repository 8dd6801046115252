"""MiniLM from the files of its package, which ``make test-integrations`` installs."""

import pytest
import torch
from torch.nn import functional as F

from fldiag import minilm, models
from fldiag.data.text import Words
from fldiag.errors import FldiagError
from fldiag.params import Layout
from fldiag.sections import SPECIAL


@pytest.fixture(autouse=True)
def _forget():
    minilm.file.cache_clear()
    yield
    minilm.file.cache_clear()


def test_the_encoder_knows_what_sentences_mean():
    made = models.build("minilm", (16,), 2)
    assert Layout.of(made).size == 22_713_216 - 384 * 385 + 2 * 385, (
        "without the pooler that it was not trained with"
    )
    words = Words.of(minilm.pieces(SPECIAL)[0], 16)
    texts = [
        ("a gripping film about love",),
        ("a touching movie on romance",),
        ("the tax code was amended",),
    ]
    x = words.numbers(texts).long()
    with torch.no_grad():
        z = F.normalize(made.eval().features(x), dim=1)
        longer = F.normalize(
            made.features(Words.of(minilm.pieces(SPECIAL)[0], 24).numbers(texts).long()), dim=1
        )
    near, far = float(z[0] @ z[1]), float(z[0] @ z[2])
    assert near > 0.6 > 0.2 > far
    torch.testing.assert_close(z, longer, rtol=0, atol=1e-5)


def test_adapters_are_all_that_is_trained_and_other_files_are_refused(monkeypatch):
    made = models.build("minilm", (8,), 2, {"lora_rank": 4})
    assert Layout.of(made).size == 12 * 2 * 4 * 384 + 2 * 385
    minilm.file.cache_clear()
    monkeypatch.setitem(minilm.PINNED, minilm.WEIGHTS, "0" * 64)
    with pytest.raises(FldiagError, match="is not the file that is known here"):
        models.build("minilm", (8,), 2)
