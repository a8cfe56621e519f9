"""One readable training loop."""

from interp.training.train import DivergedError, TrainConfig, Trained, TrainingFolderError, accuracy, train

__all__ = ["DivergedError", "TrainConfig", "Trained", "TrainingFolderError", "accuracy", "train"]
