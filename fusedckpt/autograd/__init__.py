"""The parts that fused layers share: the path and level of a call, the begin of its backward.

A call is settled once (dispatch), and saves through its phase (phases); backward has
helpers of a Function's backward and its op. Saved tensors that are made again are in recipes:
origins knows them by autograd's nodes, tracker by their storages, replay calls a function again.
Private names of torch are in private alone.
"""
