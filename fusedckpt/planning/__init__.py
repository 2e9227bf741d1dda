"""`plan`: measures a model's units, and finds the fastest plan that fits a memory budget.

A model goes units -> survey -> meter -> measure -> solver -> trials -> plans; a plan gives each
unit a role. README.md has the picture.
"""
