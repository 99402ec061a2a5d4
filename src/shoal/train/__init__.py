"""Worker groups: one Python program trains one model over many devices.

>>> import shoal.train
>>> with shoal.train.worker_groups(groups=2) as groups:
...     with shoal.train.Trainer(model, loss, optimizer, groups) as trainer:
...         for batch in loader:
...             trainer.step(batch)
"""

from shoal.train.errors import (
    BatchError,
    CannotCut,
    CheckpointError,
    DataError,
    GroupError,
    GroupLostError,
    NotFiniteError,
    TrainError,
)
from shoal.train.groups import WorkerGroup, WorkerGroups, worker_groups
from shoal.train.stages import cut
from shoal.train.trainer import Step, Trainer

__all__ = [
    "BatchError",
    "CannotCut",
    "CheckpointError",
    "DataError",
    "GroupError",
    "GroupLostError",
    "NotFiniteError",
    "Step",
    "TrainError",
    "Trainer",
    "WorkerGroup",
    "WorkerGroups",
    "cut",
    "worker_groups",
]
