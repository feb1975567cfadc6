"""Types of numpy arrays, named after the type of their numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
Uint64Array = NDArray[np.uint64]
BoolArray = NDArray[np.bool_]
