"""Rollouts that report themselves: a controller submits tasks to a pool, workers beside the engines run them and announce
their results.

    RolloutPool    in the controller: futures, callbacks, batches in order of completion. Metadata only
    RolloutWorker  beside an engine, or inside it: runs the user's async function, puts rows into its store, announces them

`machine` (with `machine_io`, `machine_state`) decides for the pool and `link` for one pool on the worker's side; both are
pure. `pool` with `checks` and `futures`, and `worker` with `generated`, `connections` and `pool_connection`, are sockets and
threads around them. `serial` is a thread that runs calls in order.

No party asks another whether it is done. A worker's request for work is parked at the pool; what has finished is announced
until the pool has answered. Whoever is silent for `silence_s`, or whose process has ended, is treated as lost.
"""
