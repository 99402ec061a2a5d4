"""Worker groups: one Python program trains one model over many devices.

>>> import shoal.train
>>> with shoal.train.worker_groups(groups=2) as groups:
...     with shoal.train.Trainer(model, loss, optimizer, groups) as trainer:
...         for batch in loader:
...             trainer.step(batch)
"""

from shoal.train.data.loading import Feed, Loader, StreamLoader, load
from shoal.train.group.errors import (
    BatchError,
    CannotCut,
    CheckpointError,
    DataError,
    GroupError,
    GroupLostError,
    NotFiniteError,
    TrainError,
)
from shoal.train.group.groups import WorkerGroup, WorkerGroups, worker_groups
from shoal.train.group.timeline import Span, Timeline
from shoal.train.model.stages import cut
from shoal.train.run.checkpoint import Checkpoints, Snapshot, latest, restore, snapshot
from shoal.train.run.fit import History, fit
from shoal.train.step.prepared_batches import Prepared
from shoal.train.step.trainer import Trainer
from shoal.train.step.training_step import Step

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
