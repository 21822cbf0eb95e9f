"""The contract between trainer and engine: messages, manifest and layout, digests, addresses, errors.

Knows no engine, no transport and no `torch.distributed`.
"""
