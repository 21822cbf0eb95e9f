"""A whole job (trainer ranks, replicas, worker ranks) in one thread, with simulated time, under faults from one seed.

The idea is that of two databases. FoundationDB ("Simulation and Testing" in its documentation) runs a cluster in one thread
with simulated network, disks and time, so that a seed determines everything, injects more faults than any real cluster
sees, and replays a failure exactly. TigerBeetle's VOPR does the same with its replicas, which were written as state machines
without clocks and I/O for that purpose; it checks invariants while it runs, and then lets the faults end and requires
progress ("liveness"). From both: one thread, one seed, no wall clock; faults at any event; invariants after every event; at the
end faults stop, and the next update must succeed. Ours besides: a failing schedule is shrunk to the faults that it needs.

Real code, driven by `world`:

- a worker: `WorkerGroups`, and `EngineSide` on the engine's thread;
- a coordinator: `ReplicaMachine` with the commit, pause and refusal commands;
- rank 0: `Transaction` and its `TransactionMachine`, `Inquiry` (silence and signs of life), `Leases`' round of renewals,
  `Fleet`, `FleetMachine`, `ReplicaSession`, and `RanksMachine`.

Simulated, in the place of the real shell: sockets (`network`), the groups' threads, memory and installers (`worker`), the
engine's thread and executor (`replica`), and on the trainer the straight lines of `leader.lead`, `leader.update`,
`Transaction.agree`, `Transaction.running`, `follower.follow` and `catching_up.bring_up` (`trainer`), because they block. These
are drivers: they follow the product's lines in the product's order, and a defect that is only in those lines is not found here.

Not simulated: transports that send buckets (the bytes lie in a segment, or are streamed as one bucket of each rank),
verification, sleep, several groups in one job, SGLang's way to commit (every rank runs the command). Real sockets, processes
and memory are in `tests/manager`.

    make simulate SEEDS=100000                      # on all cores (`many`); a violation is shrunk and printed
    python -m tests.simulation --seed 1234          # replays one seed, with its events
"""
