"""What every layer shares: which path and level a call takes, its ops, and what it saves.

A call is settled once (dispatch), and saves through its phase (phases); its backward begins in
backward, or, where gradients are differentiated again, goes through double_backward.
"""
