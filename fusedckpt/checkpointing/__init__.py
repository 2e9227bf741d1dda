"""Checkpoints: a segment's forward keeps its arguments, its recompute brings back the tensors.

A call makes a `Segment`; the first dropped tensor that backward asks for starts its `Recompute`.
README.md tells the whole story.
"""
