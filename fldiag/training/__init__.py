"""Training a federation. In the order of a round:

- ``setup``: once, before: data and partition, model and weights, method and clients, from the config; and each round's cohorts.
- ``client``: the local loop, one for one client or a stack (its optimisers: ``optim``).
- ``server``: ``Federation``, the state between rounds; a round sends it, gets the clients' rows, and aggregates.
- ``record``: numbers of the local steps, and of the global model on the test set.
- ``train``: all rounds of a run on any executor, what each leaves, and how a stored run goes on.

After the last round ``personalise`` fine-tunes each client a model. ``sweep`` trains many runs.
"""
