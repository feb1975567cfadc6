"""Studies: arms of one pretraining recipe compared at equal cost, each at settings chosen for it, over fresh seeds.

settings.py         a study file
measure_settings.py what is asked of a finished run
pieces.py           the runs that a study is made of, and their recipes
budget.py           steps of each run from the budget
check.py            what is refused before the first step
run.py              the study as a run: one piece after another, resumable
piece_run.py        one piece: trained, then measured
measuring.py        the measures
results.py          choice, spreads, differences and verdicts, computed from the scores
report.py, figures.py  results for people
"""
