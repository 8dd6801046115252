"""MiniLM from the files of its package."""

from torch.nn import functional as F

from fldiag import models
from fldiag.data.text import Words
from fldiag.models import minilm


def test_the_encoder_knows_what_sentences_mean():
    encoder, pieces = models.build("minilm", (16,), 2).eval(), minilm.pieces()[0]
    sentences = "a gripping film about love", "a touching movie on romance", "the tax was amended"
    tokens = Words.of(pieces, 16).numbers([(s,) for s in sentences]).long()
    z = F.normalize(encoder.features(tokens))
    assert z[0] @ z[1] > 0.6 > 0.2 > z[0] @ z[2]
