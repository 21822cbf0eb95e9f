"""The replicas of a job as rank 0 knows them: registration, sessions, the state of each, signs of life, pauses.

`FleetMachine` decides without sockets or clocks; `Fleet` is the shell around it and the only owner of what is known of replicas.
Knows settings and the wire, but nothing of updates, which stand above it.
"""
