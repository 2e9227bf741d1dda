"""The checkpoint wrapper: a segment's forward keeps its arguments, its recompute the rest, once.

A call makes a Segment; the first saved tensor that backward asks for starts its Recompute.
"""
