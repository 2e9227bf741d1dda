"""`fuse`: finds blocks in a model by recording their forwards, and swaps them for fused layers.

A module goes swap -> matcher -> recording -> structure -> match_*; its forward is swapped's then.
"""
