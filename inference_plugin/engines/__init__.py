"""What connects a worker to an engine: the coordinator and the parts that every engine shares, and a room for each engine.

An engine's room holds that engine's patch points and nothing else; its table of them is checked when the engine starts.
"""
