"""How messages travel: addresses in the runtime directory, channels that ask, the server that answers, CURVE keys,
registration.

Knows `wire`; knows no engine, no group and no `torch.distributed`. Every wait here has a deadline.
"""
