"""Is training under a layout the same as training in one process?

Compares loss, every gradient and the parameters after some steps, by global tensor name, with one
fp32 process: `parity` for a config and layouts of one's own, `run_matrix` for small models of every
family over all the combinations of the parallel axes.
"""

from mcore_train.parity.metric import (
    LEAST_MARGIN,
    TOLERANCE,
    Difference,
    Record,
    Report,
    compare,
)
from mcore_train.parity.run import comparable, parity, record, record_rank, world_size

__all__ = [
    "LEAST_MARGIN",
    "TOLERANCE",
    "Difference",
    "Record",
    "Report",
    "comparable",
    "compare",
    "parity",
    "record",
    "record_rank",
    "world_size",
]
