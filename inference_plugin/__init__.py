"""What runs beside an inference engine, and the contract that both sides of Weightwire share.

Importing this package needs neither an engine nor a GPU; what needs one is imported where it is used.
"""

__version__ = "0.1.0"
