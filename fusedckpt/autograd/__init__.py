"""What every layer shares: which path and level a call takes, its ops, and what it saves.

A call goes dispatch -> levels -> phases -> custom_op; its backward comes back through phases, or,
where gradients are differentiated again, through double_backward.
"""
