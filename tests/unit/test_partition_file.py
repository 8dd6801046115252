"""The table and the file of a partition."""

import numpy as np
import pytest

import fldiag
from fldiag.data import partition
from fldiag.errors import FldiagError


def test_summary_counts_every_class_of_every_client():
    labels = np.array([0, 0, 2, 1, 2, 2])
    frame = partition.summary([np.array([0, 1, 2]), np.array([3, 4, 5, 5])], labels)
    assert list(frame.columns) == ["client", "class", "count"]
    counts = frame.pivot(index="client", columns="class", values="count")
    assert counts.to_numpy().tolist() == [[2, 0, 1], [0, 1, 3]]


def test_a_saved_partition_comes_back(tmp_path):
    parts = partition.make("lda", np.tile(np.arange(10), 100), 7, 1, alpha=0.5)
    partition.save(tmp_path / "partition.npz", parts)
    back = partition.load_parts(tmp_path / "partition.npz")
    assert len(back) == 7 and all(
        np.array_equal(a, b) and b.dtype == np.int64 for a, b in zip(parts, back, strict=True)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["partition.npz"]


@pytest.mark.parametrize(
    "arrays",
    [
        {"indices": np.arange(4)},
        {"indices": np.arange(4), "offsets": np.array([0, 3])},
        {"indices": np.arange(4), "offsets": np.array([0, 3, 2, 4])},
        {"indices": np.arange(4.0), "offsets": np.array([0, 4])},
        {"indices": np.array([0, None]), "offsets": np.array([0, 2])},
    ],
)
def test_a_foreign_partition_file_is_refused(tmp_path, arrays):
    np.savez(tmp_path / "p.npz", **arrays)
    with pytest.raises(FldiagError, match="is not a partition"):
        partition.load_parts(tmp_path / "p.npz")


def test_a_missing_or_damaged_partition_file_is_named(tmp_path):
    with pytest.raises(FldiagError, match="no partition at"):
        partition.load_parts(tmp_path / "none.npz")
    partition.save(tmp_path / "p.npz", [np.arange(500)])
    whole = (tmp_path / "p.npz").read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "p.npz").write_bytes(damaged)
        with pytest.raises(FldiagError, match="is not a partition"):
            partition.load_parts(tmp_path / "p.npz")


def test_a_flipped_byte_anywhere_is_one_error_or_nothing(tmp_path):
    parts = partition.make("iid", np.zeros(40, dtype=int), 3, 1)
    partition.save(tmp_path / "p.npz", parts)
    whole = (tmp_path / "p.npz").read_bytes()
    for i in range(len(whole)):
        (tmp_path / "p.npz").write_bytes(whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :])
        try:  # some bytes are of no consequence, such as a date
            assert all(
                np.array_equal(a, b)
                for a, b in zip(partition.load_parts(tmp_path / "p.npz"), parts, strict=True)
            )
        except FldiagError as error:
            assert "is not a partition" in error.what


def test_a_runs_partition_is_the_one_that_it_wrote(tmp_path):
    config = fldiag.Config.load(
        "digits",
        rounds=1,
        clients__per_round=2,
        train__epochs=1,
        model__name="mlp",
        checkpoint__clients="sampled",
    )
    run = fldiag.train(config, out=tmp_path / "run")
    file = run.path / "partition.npz"
    partition.save(file, partition.load_parts(file)[::-1])
    for ask in (
        lambda: fldiag.diagnose(run, "forgetting"),
        lambda: fldiag.diagnose(run, "spectrum", slice="client:1"),
    ):
        with pytest.raises(FldiagError, match=r"partition\.npz is not the file this run wrote"):
            ask()
