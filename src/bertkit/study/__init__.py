"""Studies: compare arms of one pretraining recipe at equal cost, each with its own chosen settings, on fresh seeds.

A study file (settings.py, measure_settings.py) becomes a planned study (planned.py): all recipes are loaded
(study_runs.py) and checked (check.py), and the budget is converted to steps (budget.py). run.py opens the run
directory; runner.py executes the runs, each of which context.py and measurer.py train and measure. results.py computes
choices, spreads, differences and verdicts from the scores; report.py and plots.py present them.
"""
