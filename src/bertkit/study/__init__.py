"""Studies: arms of one pretraining recipe compared at equal cost, each at settings chosen for it, over fresh seeds.

A study file (settings.py, measure_settings.py) becomes a planned study (planned.py): all recipes are loaded
(study_runs.py) and checked (check.py), and the budget becomes steps (budget.py). run.py opens the run directory,
work.py carries the runs out, each trained and measured by workplace.py and measuring.py.
results.py computes choice, spreads, differences and verdicts from the scores; report.py and figures.py show them.
"""
