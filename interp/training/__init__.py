"""One readable training loop, many models in one batched model, run folders."""

from interp.tasks.train_config import TrainConfig
from interp.training.folder import Trained, TrainingFolderError, open_run
from interp.training.judge import judge, samples
from interp.training.train import DivergedError, train

__all__ = ["DivergedError", "TrainConfig", "Trained", "TrainingFolderError", "judge", "open_run", "samples", "train"]
