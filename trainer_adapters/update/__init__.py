"""Operations of all trainer ranks: an update, a verification, and the catch-up of one replica between updates.

`leader` and `follower` are the two halves of the protocol among the ranks; `transaction` carries one version into a set of
replicas. Decisions are made by machines without sockets or clocks (`machine`, `turns`); the rest is the shell around them.
Uses `fleet` and `sources`; nothing there knows this room.
"""
