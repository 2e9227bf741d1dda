"""What every fused layer shares: the path and level of a call, and the begin of its backward.

A call is settled once (dispatch), and saves through its phase (phases); backward has what a
Function's backward and its op need. Private names of torch are in private alone.
"""
