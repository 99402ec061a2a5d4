"""Worker groups: one Python program trains one model over many devices.

>>> import shoal.train
>>> with shoal.train.worker_groups(groups=2) as groups:
...     with shoal.train.Trainer(model, loss, optimizer, groups) as trainer:
...         for batch in loader:
...             trainer.step(batch)
"""

from shoal.train.checkpoint import Checkpoints, Snapshot, latest, restore, snapshot
from shoal.train.division import Prepared
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
from shoal.train.fit import History, fit
from shoal.train.groups import WorkerGroup, WorkerGroups, worker_groups
from shoal.train.loading import Feed, Loader, StreamLoader, load
from shoal.train.stages import cut
from shoal.train.timeline import Span, Timeline
from shoal.train.trainer import Step, Trainer

__all__ = [
    "BatchError",
    "CannotCut",
    "CheckpointError",
    "Checkpoints",
    "DataError",
    "Feed",
    "GroupError",
    "GroupLostError",
    "History",
    "Loader",
    "NotFiniteError",
    "Prepared",
    "Snapshot",
    "Span",
    "Step",
    "StreamLoader",
    "Timeline",
    "TrainError",
    "Trainer",
    "WorkerGroup",
    "WorkerGroups",
    "cut",
    "fit",
    "latest",
    "load",
    "restore",
    "snapshot",
    "worker_groups",
]
