"""`fuse`: finds blocks in a model by recording their forwards, and swaps them for fused layers.

A module goes swap -> matcher -> match_* -> recording -> layouts -> verification; its forward is
then one of forwards.py.
"""
