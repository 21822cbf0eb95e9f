"""How the bytes of an update get across: one file per transport (helpers beside it), and the registry.

A third party adds a transport through `inference_plugin.plugins`, without a change here.
"""
