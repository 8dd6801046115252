"""Data sets, augmentation, partitions over clients, and the slices that diagnostics look at."""

from fldiag.data import partition
from fldiag.data.dataset import Dataset, Slice, take
from fldiag.data.sources import load, remarks

__all__ = ["Dataset", "Slice", "load", "partition", "remarks", "take"]
