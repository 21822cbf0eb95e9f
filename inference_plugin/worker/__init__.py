"""What runs in every engine worker process: the reply socket and the weight-update groups.

The state machine is pure: `machine` (all groups), `group` with `transaction` (one group's state), and what events do to it
in `requests`, `results`, `commit`; `events` come in, `actions` go out. It imports neither torch nor ZMQ. The shell around it:
`groups` (lock and threads), `work` (what takes time), `engine_side` (the engine's own thread), `server` (the socket).

No engine is named here; `engines` connects a worker to one.
"""
