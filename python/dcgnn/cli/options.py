"""Command-line options made from the signatures of the model and the training configuration."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from dcgnn.baselines import BASELINES, ConvNet
from dcgnn.nn.model import DCGNN
from dcgnn.nn.msg_passing import DCMsgPassing
from dcgnn.recipe import TITLES, Recipe
from dcgnn.training import TrainConfig

#: Arguments of the model that follow from the graph or from another argument.
_NOT_OPTIONS = frozenset(
    {"in_channels", "out_channels", "num_nodes", "channels", "conv", "prepared", "cached"}
)

#: Flags that read better than the name of the argument.
_FLAGS = {"hidden_channels": "hidden", "num_layers": "layers"}

#: Where training from the command line starts from, if not at the default of the signature:
#: the skeleton that serves homophilous graphs (Cora) and heterophilous ones (Minesweeper) alike.
_DEFAULTS: Mapping[str, Any] = {
    "hidden_channels": 64,
    "num_global": 0,
    "dropout": 0.3,
    "norm": "layer",
    "residual": True,
    "node_activation": "relu",
    "transform": "per-cluster",
    "ego_readout": True,
}

_MODEL_HELP = {
    "hidden_channels": "width of the hidden layers",
    "num_global": "number |Ω| of global clusters; 0: about 8, a multiple of the classes",
    "num_layers": "number of message-passing layers",
    "num_mlp_layers": "layers of the MLP before message passing",
    "dropout": "dropout probability",
    "input_dropout": "dropout probability of the input features; none: that of --dropout",
    "norm": "norm between layers: none, batch or layer",
    "residual": "add a linear map of the node itself in every layer",
    "node_activation": "activation of the nodes between layers: none, relu, ...",
    "adjacency_embedding": "add an embedding of the adjacency rows to the input, as in LINKX",
    "num_local": "number K of local clusters of every ego-neighbourhood",
    "alpha": "weight α of the global clusters against the local ones",
    "beta": "weight β of the input features",
    "lam": "λ, the inverse temperature of the transport",
    "global_iters": "Sinkhorn iterations of the global problem; none: to convergence",
    "local_iters": "Sinkhorn iterations of the local problems; none: to convergence",
    "local_cost_scale": "scale of the local costs: none, mean or max",
    "global_cost_scale": "scale of the global costs: none, mean or max",
    "gamma": "normalisation of the node update: exact or paper",
    "mass": "unit of mass in a problem: node or paper",
    "aggr": "broadcast from the local clusters: mean, sum or symmetric",
    "local_init": "local clusters of a layer: carry over or fresh",
    "activation": "activation of the cluster embeddings: none, tanh, ...",
    "transform": "learnable map of the cluster embeddings: none, shared or per-cluster",
    "weight_period": "repeat the learnable maps after so many layers; none: every layer has its own",
    "global_momentum": "start the global clusters at a moving average with this momentum; none: trainable",
    "ego_readout": "let a node read the clusters of its own ego directly",
    "heads": "attention heads",
    "num_edge_layers": "layers of the map of the adjacency rows",
    "num_node_layers": "layers of the map of the features",
}

_TRAIN_HELP = {
    "epochs": "most epochs to run",
    "lr": "learning rate of Adam",
    "lr_schedule": "constant, or cosine: from --lr down to 0 over --epochs",
    "weight_decay": "weight decay of Adam",
    "patience": "epochs without a better validation metric before training stops",
    "ortho_weight": "weight ω1 of the orthogonality loss",
    "sim_weight": "weight ω2 of the similarity loss",
    "sim_aggr": "join the clusters of a class by max, mean or sum",
    "sim_metric": "similarity loss by cosine or distance",
    "objective_every": "record the objective of every layer after so many epochs, for dcgnn report; 0: never",
}


def model_defaults(model: str = "dcgnn") -> dict[str, Any]:
    """Every option of a model with the default of the command line."""
    return {name: default for name, (_, default) in _model_parameters(model).items()}


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """One option for every argument of :class:`~dcgnn.DCGNN` that the graph does not fix."""
    for name, (kind, default) in _model_parameters("dcgnn").items():
        _add(parser, name, kind, default, _MODEL_HELP.get(name, "see the argument of DCGNN"))


def add_baseline_options(parser: argparse._ActionsContainer) -> None:
    """One option for every argument that only baselines have; the others bear the names of DC-GNN's."""
    for name, models in _baseline_options().items():
        kind, default = _model_parameters(models[0])[name]
        titles = ", ".join(TITLES[model] for model in models)
        _add(parser, name, kind, default, f"{titles}: {_MODEL_HELP[name]}")


def _baseline_options() -> dict[str, list[str]]:
    """The options that DC-GNN does not have, and which models do."""
    found: dict[str, list[str]] = {}
    for model in BASELINES:
        for name in set(model_defaults(model)) - set(model_defaults()):
            found.setdefault(name, []).append(model)
    return dict(sorted(found.items()))


def train_option_names() -> list[str]:
    """Fields of :class:`~dcgnn.training.TrainConfig` that are options; seeds have their own."""
    return [field.name for field in dataclasses.fields(TrainConfig) if field.name != "seed"]


def add_train_options(parser: argparse._ActionsContainer) -> None:
    """One option for every field of :class:`~dcgnn.training.TrainConfig` but the seed."""
    defaults = TrainConfig()
    for name in train_option_names():
        default = getattr(defaults, name)
        _add(parser, name, type(default), default, _TRAIN_HELP[name])


def fill(arguments: argparse.Namespace, preset: Recipe | None = None) -> None:
    """Give every option of the model, and of training, that was not given its value from the preset, else its
    default.

    Raises:
        ValueError: If an option was given, or is in the preset, that the model does not have.
    """
    model = arguments.model
    own = model_defaults(model)
    for name in set(model_defaults()) | set(_baseline_options()):
        if name not in own and hasattr(arguments, name):
            raise ValueError(f"{_flag(name)}: {TITLES[model]} does not have it")
    defaults = own | {name: getattr(TrainConfig(), name) for name in train_option_names()}
    if preset is not None:
        if unknown := set(preset.options) - set(own):
            raise ValueError(f"preset: the model has no option {', '.join(sorted(unknown))}")
        if "hidden_channels" not in preset.options:
            raise ValueError("preset: its options lack hidden_channels")
        # The preset was found with the model's own defaults, not with those of the command line.
        defaults |= {name: default for name, (_, default) in _model_parameters(model, {}).items()}
        defaults |= {**preset.options, **preset.training}
    for name, value in defaults.items():
        if not hasattr(arguments, name):
            setattr(arguments, name, value)


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the model as they were given."""
    return {name: getattr(arguments, name) for name in model_defaults(arguments.model)}


def train_config(arguments: argparse.Namespace, seed: int) -> TrainConfig:
    """The training configuration as it was given, for one seed."""
    given = {name: getattr(arguments, name) for name in train_option_names()}
    return TrainConfig(seed=seed, **given)


def _model_parameters(model: str, starting: Mapping[str, Any] = _DEFAULTS) -> dict[str, tuple[Any, Any]]:
    """Type and default of every option of a model, by name of the argument.

    Where ``starting`` does not name one, it is the default of the signature.

    What :class:`~dcgnn.DCGNN` does not name itself it hands on to its message passing, and a baseline to
    :class:`~dcgnn.baselines.ConvNet`.
    """
    owners: list[Callable[..., Any]] = [DCGNN, DCMsgPassing]
    if model != "dcgnn":
        owners = [BASELINES[model]]
        if _takes_more(BASELINES[model]):
            owners.append(ConvNet)
    found: dict[str, tuple[Any, Any]] = {}
    for owner in owners:
        kinds = get_type_hints(vars(owner)["__init__"] if isinstance(owner, type) else owner)
        for name, parameter in inspect.signature(owner).parameters.items():
            if parameter.kind != parameter.VAR_KEYWORD and name not in _NOT_OPTIONS | set(found):
                found[name] = (kinds[name], starting.get(name, parameter.default))
    return found


def _takes_more(builder: Callable[..., Any]) -> bool:
    """Whether it hands on options that it does not name."""
    parameters = inspect.signature(builder).parameters.values()
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)


def _flag(name: str) -> str:
    return "--" + _FLAGS.get(name, name).replace("_", "-")


def _add(parser: argparse._ActionsContainer, name: str, kind: Any, default: Any, help_text: str) -> None:
    flag = _flag(name)
    shown = "none" if default is None else default
    text = f"{help_text} (default: {shown})".replace("%", "%%")
    if kind is bool:
        parser.add_argument(
            flag, dest=name, default=argparse.SUPPRESS, action=argparse.BooleanOptionalAction, help=text
        )
        return
    parts = get_args(kind) or (kind,)
    number = next((part for part in (int, float) if part in parts), None)
    metavar = {int: "N", float: "X", None: "WORD"}[number]
    read: Callable[[str], Any] = number or str
    if type(None) in parts:
        read = _or_none(read)
    parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, type=read, metavar=metavar, help=text)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read ``none`` as no value, anything else by ``read``."""

    def convert(text: str) -> Any:
        return None if text.lower() == "none" else read(text)

    # argparse names the type in its messages.
    convert.__name__ = f"{read.__name__} or none"
    return convert
