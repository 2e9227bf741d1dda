"""`fuse`: finds blocks in a model by recording their forwards, and swaps them for fused layers.

A module goes fuser -> matcher -> match_* -> recording -> recorded_block -> verification; its
forward is then one of fused_*.py.
"""
