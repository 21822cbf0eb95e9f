"""The contract between trainer and engine: messages, codec, manifest, geometry, digests, errors, reports, configuration.

No sockets, no files, no engine and no `torch.distributed` here. A message that an older peer cannot read raises
`messages.PROTOCOL_VERSION`.
"""
