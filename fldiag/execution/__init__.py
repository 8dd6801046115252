"""Where work runs: this process, processes of this machine, a Dask cluster, or any ``concurrent.futures.Executor``.

Work is a function of state that all units share and of one unit: ``function(shared, unit)``. Both must be picklable; the state
goes to a worker once, a unit whenever it is to be done, and the result does not depend on where that is. A worker that dies
loses its unit only, which is done again.
"""
