"""Other ways to run an operator in another process, measured in the same run as ours.

Each peer lives in a child process of its own (see `driver.py`), so that neither its threads nor its
imports disturb the process that is measured, and so that it may live in another environment.
"""
