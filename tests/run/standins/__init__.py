"""Packages that stand in for the libraries of experiment trackers: put this directory on sys.path.

Each accepts what the real library (wandb 0.31, mlflow 3.17) accepts, appends what it is told to the list `told`, and
raises `failure` if that is set. Both print to stdout, as the real ones do.
"""
