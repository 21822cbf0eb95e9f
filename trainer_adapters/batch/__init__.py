"""The way back: what engines generated, by reference, to the trainers that learn from it.

Only metadata passes through the controller. The bytes of a row stay in the process that made them, its *owner*, until a
consumer needs them: on the owner's host the consumer maps them (copy on write), elsewhere it pulls them.

    task      one prompt: a `task_id` that is unique over a whole training, with one or more rows (the samples of a group)
    shard     the rows of one task under one key: `ShardId(task_id, key)`
    entry     a shard's metadata (`Entry`): kind, dtype, shape, bytes, digest, weight versions, owner; no address
    part      a shard's data in this process's memory (`LocalPart`)
    column    the rows of one key of a batch, over many parts or entries
    batch     columns of equally many rows: `DistributedBatch`, which is LOCAL, REMOTE or EMPTY

    records, values, parts        what an entry says, and the bytes that stand for rows
    inputs                        what users give as rows
    rows, schemas, columns        rows by reference: which row of which part; numpy only
    batch                         `DistributedBatch`, with status, alignment, balance, padding, packing, fetching
    nested, merging, tensordicts  results of any shape, of several workers, and tensordict's
    ranks                         a batch at work on the ranks of a trainer
    boundary                      the interface of `client`, the module that moves bytes

None of these modules uses a socket. Bytes move between `client` and the owner's `store`; only these two know where rows lie.
Write a new operation in `batch`, as a computation on row indices: then it gives the same rows LOCAL and REMOTE.
This package uses `inference_plugin.wire`, `net` and `transports`; it imports nothing about replicas, updates or sources.
"""
