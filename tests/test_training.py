"""Training: metrics, early stopping, exact resume, interruption, divergence."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from dcgnn import DCGNN, baselines
from dcgnn.checkpoint import CheckpointError, load_checkpoint
from dcgnn.data import load_graph
from dcgnn.metrics import check_scorable, score
from dcgnn.timing import interleaved_medians
from dcgnn.training import TrainConfig, TrainingDiverged, TrainingInterrupted, train


@pytest.fixture(scope="module")
def data():
    return load_graph("sbm:num_nodes=120,homophily=0.8,signal=2.0,num_features=8")


def make_model(seed: int = 0, **options) -> DCGNN:
    torch.manual_seed(seed)
    return DCGNN(8, 16, 2, 4, **{"dropout": 0.5, "norm": "batch", **options})


class Hooked(nn.Module):
    """A linear model that calls ``hook(epoch)`` before each training step."""

    def __init__(self, hook, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(channels, 2)
        self.hook = hook
        self.calls = 0

    def forward(self, x, graph):
        out = torch.dropout(self.lin(x), 0.3, self.training)
        if self.training:
            self.calls += 1
            changed = self.hook(self.calls)
            out = out if changed is None else out * changed
        return out


def assert_same_run(first, second):
    for name in ("loss", "val_loss", "val_metric"):
        assert getattr(first.history, name) == getattr(second.history, name)
    for name in ("train_metric", "val_metric", "test_metric", "best_epoch", "epochs"):
        assert getattr(first, name) == getattr(second, name)


def assert_same_weights(first: nn.Module, second: nn.Module):
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_learns_and_ends_with_the_best_weights(data):
    model = make_model()
    result = train(model, data, TrainConfig(epochs=60))
    assert result.test_metric > 0.9
    assert result.epochs == len(result.history.loss) == len(result.history.seconds)
    assert result.val_metric == max(result.history.val_metric)
    assert result.history.val_metric[result.best_epoch - 1] == result.val_metric
    model.eval()
    with torch.no_grad():
        logits = model(data.x, data.edge_index)
    assert score(logits[data.test_mask], data.y[data.test_mask], "accuracy") == result.test_metric
    assert result.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("make", [baselines.gcn, baselines.gat])
def test_baselines_share_the_skeleton(data, make):
    torch.manual_seed(0)
    model = make(8, 16, 2, num_layers=3, norm="layer", residual=True, dropout=0.1)
    assert train(model, data, TrainConfig(epochs=30)).test_metric > 0.9
    with pytest.raises(ValueError, match=r"norm must be one of .*, got .group."):
        make(8, 16, 2, norm="group")


def test_gat_heads_must_share_the_width():
    with pytest.raises(ValueError, match=r"hidden_channels \(10\) must be a multiple of heads"):
        baselines.gat(8, 10, 2)


def test_the_same_seed_gives_the_same_run(data):
    config = TrainConfig(epochs=5)
    first, again = (train(make_model(), data, config) for _ in range(2))
    assert_same_run(first, again)
    other = train(make_model(), data, replace(config, seed=1))
    assert first.history.loss != other.history.loss


def test_stops_early(data):
    def frozen(call):
        return 0.0

    result = train(Hooked(frozen), data, TrainConfig(epochs=50, patience=7, weight_decay=0.0))
    assert result.stopped_early
    assert (result.best_epoch, result.epochs) == (1, 8)


@pytest.mark.parametrize("weights", [{}, {"ortho_weight": 0.1, "sim_weight": 0.1}])
def test_resume_equals_an_uninterrupted_run(data, tmp_path, weights):
    config = TrainConfig(epochs=12, **weights)
    whole_model = make_model()
    whole = train(whole_model, data, config, checkpoint=tmp_path / "whole.pt", checkpoint_every=50)

    path = tmp_path / "run.pt"
    train(make_model(), data, replace(config, epochs=5), checkpoint=path, checkpoint_every=5)
    torch.rand(17)  # what the process draws in between must not matter
    model = make_model(seed=99)
    resumed = train(model, data, config, checkpoint=path, checkpoint_every=5, resume=True)

    assert_same_run(whole, resumed)
    assert_same_weights(whole_model, model)
    first, second = load_checkpoint(tmp_path / "whole.pt"), load_checkpoint(path)
    assert torch.equal(first["rng"][0], second["rng"][0])
    for a, b in zip(first["optimizer"]["state"].values(), second["optimizer"]["state"].values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_cosine_takes_the_learning_rate_down_to_nothing():
    config = TrainConfig(lr=0.2, epochs=10, lr_schedule="cosine")
    rates = [config.lr_of(epoch) for epoch in range(11)]
    assert rates[0] == 0.2
    assert rates[5] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(0, abs=1e-12)
    assert rates == sorted(rates, reverse=True)
    assert TrainConfig(lr=0.2, epochs=10).lr_of(9) == 0.2


def test_a_cosine_run_steps_by_its_rates_and_resumes_exactly(data, tmp_path):
    path = tmp_path / "run.pt"
    config = TrainConfig(epochs=8, lr_schedule="cosine")
    whole = train(Hooked(lambda call: None), data, config)
    constant = train(Hooked(lambda call: None), data, replace(config, lr_schedule="constant"))
    assert whole.history.loss[:2] == constant.history.loss[:2], "the first step has the same rate"
    assert whole.history.loss != constant.history.loss

    def interrupt(call):
        if call == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        train(Hooked(interrupt), data, config, checkpoint=path)
    with pytest.raises(CheckpointError, match="epochs is 8 in the checkpoint and 9 here"):
        train(Hooked(interrupt), data, replace(config, epochs=9), checkpoint=path, resume=True)
    resumed = train(Hooked(lambda call: None), data, config, checkpoint=path, resume=True)
    assert_same_run(whole, resumed)


def test_a_finished_run_resumes_to_its_result(data, tmp_path):
    config = TrainConfig(epochs=6)
    path = tmp_path / "run.pt"
    first = train(make_model(), data, config, checkpoint=path, checkpoint_every=4)
    again = train(make_model(3), data, config, checkpoint=path, resume=True)
    assert_same_run(first, again)


def test_a_checkpoint_of_another_run_is_refused(data, tmp_path):
    config = TrainConfig(epochs=2)
    path = tmp_path / "run.pt"
    keep = {"checkpoint": path, "checkpoint_every": 1}
    train(make_model(), data, config, model_options={"dropout": 0.5}, **keep)

    def resume(data=data, config=config, options=None, model=None):
        train(
            model or make_model(),
            data,
            config,
            model_options=options or {"dropout": 0.5},
            checkpoint=path,
            resume=True,
        )

    with pytest.raises(CheckpointError, match=r"lr is 0\.005 in the checkpoint and 0\.5 here"):
        resume(config=replace(config, lr=0.5))
    with pytest.raises(CheckpointError, match="seed is 0 in the checkpoint and 4 here"):
        resume(config=replace(config, seed=4))
    with pytest.raises(CheckpointError, match=r"dropout is 0\.5 in the checkpoint and 0\.1 here"):
        resume(options={"dropout": 0.1})
    with pytest.raises(CheckpointError, match="split is 0 in the checkpoint and 1 here"):
        resume(data=load_graph(data.name, split=1))
    with pytest.raises(CheckpointError, match="graph is 'sbm:homophily"):
        resume(data=load_graph("sbm:num_features=8"))
    with pytest.raises(CheckpointError, match="data is"):
        resume(data=replace(data, x=data.x + 1))
    with pytest.raises(CheckpointError, match="model is 'DCGNN' in the checkpoint and 'Hooked'"):
        resume(model=Hooked(lambda call: None))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        resume(model=DCGNN(8, 32, 2, 4, norm="batch"))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        train(make_model(), data, config, checkpoint=tmp_path / "none.pt", resume=True)
    with pytest.raises(ValueError, match="resume wants the checkpoint"):
        train(make_model(), data, config, resume=True)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_after_the_epoch_and_can_be_resumed(data, tmp_path, signum, capfd):
    config = TrainConfig(epochs=9)
    whole = train(Hooked(lambda call: None), data, config)
    path = tmp_path / "run.pt"

    def interrupt(call):
        if call == 4:
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    signal.signal(signum, signal.default_int_handler)
    try:
        with pytest.raises(TrainingInterrupted) as caught:
            train(Hooked(interrupt), data, config, checkpoint=path)
        assert signal.getsignal(signum) is signal.default_int_handler, "handlers are put back"
    finally:
        signal.signal(signum, before)
    assert (caught.value.path, caught.value.epoch) == (path, 4)
    assert "stopping after this epoch" in capfd.readouterr().err
    resumed = train(Hooked(lambda call: None), data, config, checkpoint=path, resume=True)
    assert_same_run(whole, resumed)


def test_a_second_interrupt_ends_at_once_and_keeps_the_last_checkpoint(data, tmp_path):
    path = tmp_path / "run.pt"

    def interrupt(call):
        if call == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    model = Hooked(interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(model, data, TrainConfig(epochs=9), checkpoint=path, checkpoint_every=3)
    assert not isinstance(caught.value, TrainingInterrupted)
    assert load_checkpoint(path)["epoch"] == 3


def test_trains_in_a_thread_that_gets_no_signals(data):
    results = []
    worker = threading.Thread(target=lambda: results.append(train(make_model(), data, TrainConfig(epochs=2))))
    worker.start()
    worker.join()
    assert results[0].epochs == 2


def test_divergence_keeps_the_last_good_checkpoint(data, tmp_path):
    path = tmp_path / "run.pt"

    def overflow(call):
        return float("nan") if call == 4 else None

    with pytest.raises(TrainingDiverged) as caught:
        train(Hooked(overflow), data, TrainConfig(epochs=9), checkpoint=path, checkpoint_every=1)
    assert "training loss is not finite in epoch 4" in str(caught.value)
    assert f"the last good checkpoint is {path}" in str(caught.value)
    saved = load_checkpoint(path)
    assert saved["epoch"] == 3
    assert all(bool(value.isfinite().all()) for value in saved["model"].values())


def test_weights_that_overflow_in_the_step_do_not_reach_a_checkpoint(data, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(TrainingDiverged, match="output after the step is not finite in epoch 1"):
        train(
            Hooked(lambda call: None),
            data,
            TrainConfig(epochs=9, lr=3e37),
            checkpoint=path,
            checkpoint_every=1,
        )
    assert not path.exists()


def test_progress_shows_loss_and_metric(data, capfd):
    train(make_model(), data, TrainConfig(epochs=2), progress=True)
    shown = capfd.readouterr().err
    assert "loss=" in shown
    assert "val accuracy=" in shown
    assert "2/2" in shown


def test_after_every_epoch_a_caller_sees_the_best_and_may_end_training(data):
    class EnoughError(Exception):
        pass

    seen = []

    def after_epoch(epoch, best):
        seen.append((epoch, best))
        if epoch == 4:
            raise EnoughError

    whole = train(make_model(), data, TrainConfig(epochs=4))
    with pytest.raises(EnoughError):
        train(make_model(), data, TrainConfig(epochs=9), after_epoch=after_epoch)
    metrics = whole.history.val_metric
    assert seen == [(epoch, max(metrics[:epoch])) for epoch in range(1, 5)]


def test_a_request_to_stop_comes_before_what_a_caller_raises(data):
    def after_epoch(epoch, best):
        signal.raise_signal(signal.SIGTERM)  # a job in the background ignores SIGINT
        raise ValueError("not this")

    with pytest.raises(TrainingInterrupted):
        train(make_model(), data, TrainConfig(epochs=9), after_epoch=after_epoch)


def test_scores(data):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 2, generator=generator)
    y = torch.randint(2, (50,), generator=generator)
    assert score(logits, y, "accuracy") == pytest.approx(
        sum(int(row.argmax() == label) for row, label in zip(logits, y, strict=True)) / 50
    )
    probability = logits.double().softmax(dim=1)[:, 1].numpy()
    assert score(logits, y, "roc_auc") == pytest.approx(roc_auc_score(y.numpy(), probability))


def test_what_cannot_be_scored_is_named_before_training(data):
    one_class = replace(data, metric="roc_auc", val_mask=data.val_mask & (data.y == 0))
    with pytest.raises(ValueError, match="ROC AUC needs both classes, but val_mask"):
        train(make_model(), one_class)
    with pytest.raises(ValueError, match=r"test_mask of sbm.*is empty"):
        check_scorable(replace(data, test_mask=torch.zeros_like(data.test_mask)))
    with pytest.raises(ValueError, match="ROC AUC is for two classes"):
        check_scorable(replace(data, metric="roc_auc", num_classes=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be positive, got 0"),
        ({"lr_schedule": "step"}, "lr_schedule must be one of"),
        ({"patience": -1}, "patience must be positive"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"sim_weight": float("inf")}, "sim_weight must not be negative"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)


def test_candidates_are_timed_in_turns():
    calls = []
    medians = interleaved_medians(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1
    )
    assert calls == ["a", "b"] * 4
    assert set(medians) == {"a", "b"}
    assert all(value >= 0 for value in medians.values())
    calls.clear()
    interleaved_medians({"a": lambda: calls.append("a")}, rounds=100, warmup=0, max_seconds=0.0)
    assert calls == ["a"]
    with pytest.raises(ValueError, match="rounds must be positive"):
        interleaved_medians({}, rounds=0)
