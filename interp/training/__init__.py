"""One readable training loop."""

from interp.training.train import DivergedError, TrainConfig, Trained, TrainingFolderError, judge, train

__all__ = ["DivergedError", "TrainConfig", "Trained", "TrainingFolderError", "judge", "train"]
