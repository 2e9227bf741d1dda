"""`plan`: measures a model's units, and finds the fastest plan that fits a memory budget.

A model goes cuts -> unit_costs -> chain -> solver -> plans; a plan gives each unit a role.
"""
