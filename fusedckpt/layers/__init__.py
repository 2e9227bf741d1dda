"""The fused layers that users call: functions and modules.

Each makes a record of its options and calls blocks.block.run_linears, or, of a norm alone, apply.
"""
