"""MiniLM from the files of its package."""

import torch
from torch.nn import functional as F

from fldiag import models
from fldiag.data.text import Words
from fldiag.models import minilm


def test_the_encoder_knows_what_sentences_mean():
    encoder, pieces = models.build("minilm", (16,), 2).eval(), minilm.pieces()[0]
    sentences = "a gripping film about love", "a touching movie on romance", "the tax was amended"
    tokens = [Words.of(pieces, n).numbers([(s,) for s in sentences]).long() for n in (16, 24)]
    z, longer = (F.normalize(encoder.features(numbers)) for numbers in tokens)
    _, near, far = z @ z[0]
    assert near > 0.6 > 0.2 > far
    torch.testing.assert_close(z, longer, rtol=0, atol=1e-5)
