"""How staged weights get into a live model: agreement (plan, proof, layout), policies that install, read-back.

Knows torch and no engine: what an engine must give is in `contract`. Only functions that say so touch the live model.
"""
