"""What runs beside an inference engine, and the contract that both sides of Weightwire share.

Rooms, from the bottom up; each imports only those before it: `wire` (what is said), `devices` (memory, and the order of work on
it), `net` (how it is said), `plugins` (what third parties add), `transports`, `install`, `worker`, `engines`, `plugin` (the entry
points) and `cli`.

Importing this package needs neither an engine nor a GPU; a module that needs one imports it where it uses it.
"""

__version__ = "0.1.0"
