"""The model as pretraining knows it: an encoder with the heads that its objectives ask for.

Devlin et al. 2019, BERT, arXiv:1810.04805, appendix A.2. The same class as for tasks, in headed.py.
"""

from __future__ import annotations

from bertkit.models.headed import HeadedModel

PretrainingModel = HeadedModel
