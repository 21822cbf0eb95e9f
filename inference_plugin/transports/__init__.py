"""How a bucket's bytes get across: one file per transport, and the registry."""
