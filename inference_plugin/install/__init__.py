"""Gets staged weights into a live model: negotiation (plan, proof, layout), policies that install, read-back.

Knows torch and no engine: `contract` says what an engine must provide. Only functions whose docstring begins with "Engine's
thread" touch the live model.
"""
