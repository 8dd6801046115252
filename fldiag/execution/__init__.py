"""Where work runs: this process, processes of this machine, a Dask cluster, or any ``concurrent.futures.Executor``.

Work is a function of state that all units share and of one unit: ``function(shared, unit)``. Both must be picklable; the state
goes to a worker once, a unit whenever it is to be done, and the result does not depend on where that is. A worker that dies
loses its unit only, which is done again.

- ``executor``: what the options ``--executor`` and ``--shard`` mean.
- ``workspace``: where one diagnostic maps functions over items, shows progress, and keeps what is finished.
- ``pool``: what all pools are, and that of this process; ``pools``: ``open_pool``, and processes of this machine;
  ``futures_pool``: an executor handed over; ``dask_cluster``: a Dask cluster.
- ``worker``: what a worker keeps between units, and how it does one.
"""
