"""`report`: runs one training step as a trial, and says where its memory goes.

A step goes trial -> step -> timeline -> memory_report; tables and plots are drawn of that.
"""
