"""An analysis along a training: each kept step's own model, in order, in one table."""

from __future__ import annotations

import pandas as pd
import pytest

from interp import Transformer
from interp.analyses.over_training import OverTrainingError, over_training
from interp.tasks import ModularAddition
from interp.training import open_run, train


class Steps:
    """A training whose model after n steps is the number 10 n."""

    kept = (0, 1, 4)

    def at(self, step):
        assert step in self.kept
        return 10 * step


def twice(model):
    return pd.DataFrame({"value": [model, model + 1]}, index=[7, 7])


def test_one_table_with_a_step_column_first():
    table = over_training(Steps(), twice)
    assert table.columns.tolist() == ["step", "value"] and table.index.tolist() == list(range(6))
    assert table.to_numpy().tolist() == [[0, 0], [0, 1], [1, 10], [1, 11], [4, 40], [4, 41]]


def test_chosen_steps_come_in_order_each_once():
    assert over_training(Steps(), twice, steps=[4, 0, 4])["value"].tolist() == [0, 1, 40, 41]


def test_the_analysis_keeps_its_own_table():
    own = pd.DataFrame({"value": [1.0]})
    assert len(over_training(Steps(), lambda _: own)) == 3 and own.columns.tolist() == ["value"]


def test_a_training_and_its_opened_folder_give_the_models_that_were_kept(tmp_path):
    task = ModularAddition(5)
    config = task.train_config(steps=4, keep=3)
    trained = train(task.model_config(d_model=8), task, config, tmp_path / "run", progress=False)

    def size(model):
        return pd.DataFrame({"squares": [float(model.W_E.detach().square().sum())]})

    table = over_training(trained, size)
    assert table["step"].tolist() == [0, 1, 2, 4]
    start, end = Transformer(task.model_config(d_model=8), seed=config.seed), trained.model
    assert table["squares"].iloc[[0, -1]].tolist() == [float(one.W_E.detach().square().sum()) for one in (start, end)]
    assert table["squares"].nunique() == 4
    pd.testing.assert_frame_equal(over_training(open_run(tmp_path / "run"), size), table)
    with pytest.raises(
        OverTrainingError, match="steps=\\[3\\] are not allowed; allowed: one or more of the kept 0, 1, 2, 4"
    ):
        over_training(trained, size, steps=[3])
    unkept = train(task.model_config(d_model=8), task, task.train_config(steps=1), progress=False)
    with pytest.raises(
        OverTrainingError, match="kept no models along the way; train it into a folder with TrainConfig"
    ):
        over_training(unkept, size)


def test_what_is_no_training_or_no_table_is_refused(tmp_path):
    with pytest.raises(OverTrainingError, match=r"got \w*Path; for a folder: interp.training.open_run"):
        over_training(tmp_path, twice)
    with pytest.raises(OverTrainingError, match=r"steps=\[\] are not allowed"):
        over_training(Steps(), twice, steps=[])
    with pytest.raises(OverTrainingError, match="must return a pandas DataFrame, got int at step 0"):
        over_training(Steps(), lambda model: model)
    with pytest.raises(OverTrainingError, match="a column 'step' of its own at step 0"):
        over_training(Steps(), lambda model: twice(model).assign(step=1))
