"""Styles of training state: how programs call it, and what of it they keep.

    style     weights        optimizer state                  32-bit weights     steps
    fsdp2     model.NAME     optim.state.NAME.exp_avg         are the weights    float32
    torch     model.NAME     optimizer.state.7.exp_avg        are the weights    float32
    reshard   NAME           optimizer.state.NAME.exp_avg     beside, `master`   float32
    megatron  NAME           optimizer.state.NAME.exp_avg     beside, `master`   one in groups
    optax     params.NAME    optimizer.state.NAME.exp_avg     are the weights    int32

`fsdp2` is what `torch.distributed.checkpoint.state_dict.get_state_dict` gives, saved under `model`
and `optim`. `torch` is what `state_dict()` of a module and of an optimizer give, saved under
`model` and `optimizer`; parameters have numbers there, group by group. `reshard` is how
DeepSpeed's formats are read and written, whose files have names of their own; `megatron` and
`optax` are how Megatron's and Orbax's are.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.checkpoint.formats.torch_files.optimizer_states import OPTIMIZER_KEYS
from reshard.errors import UsageError

# What states of Optax are placed for (`reshard.checkpoint.formats.orbax.optax_states`).
_OPTAX_KEYS = frozenset(
    {"exp_avg", "exp_avg_sq", "square_avg", "grad_avg", "acc_delta", "sum", "momentum_buffer"}
)


@dataclass(frozen=True)
class TrainingStyle:
    """How a program keeps training state.

    Attributes:
        name: on the command line.
        program: whose optimizers go on.
        weights: what stands before the names of weights.
        optimizer: what stands before optimizer state.
        has_masters: whether 32-bit weights are kept beside those that the model computes with.
        step_type: of the number of steps that each parameter has.
        has_one_step: whether parameters have one number of steps together.
        step_keys: what is kept of parameters that have a number of steps; None for anything.
        keys: what its optimizers keep of a parameter; None where they are not known.
        has_group_steps: whether groups have the number of steps, beside what parameters have.
        groups: the name of the list of groups; None where hyper-parameters are not saved.
        are_groups_apart: whether each hyper-parameter is a value by itself.
        are_numbered: whether parameters have numbers in optimizer state.
        are_names_nested: whether each word of a name is a level of the nested state.
    """

    name: str
    program: str
    weights: str
    optimizer: str
    has_masters: bool = True
    step_type: str = "float32"
    has_one_step: bool = False
    step_keys: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    has_group_steps: bool = False
    groups: str | None = None
    are_groups_apart: bool = False
    are_names_nested: bool = False
    are_numbered: bool = False

    def weight_name(self, parameter: str) -> str:
        """The name of a weight.

        >>> training_style("fsdp2").weight_name("up.weight")
        'model.up.weight'
        """
        return self.weights + parameter

    @property
    def is_pytorch(self) -> bool:
        """Whether PyTorch's optimizers load it, which want all that they keep in groups."""
        return self.are_groups_apart or self.are_numbered

    def state_name(self, parameter: str, key: str) -> str:
        """The name of what an optimizer keeps of a parameter.

        >>> training_style("fsdp2").state_name("up.weight", "exp_avg")
        'optim.state.up.weight.exp_avg'
        """
        return f"{self.optimizer}{parameter}.{key}"

    def weight_path(self, parameter: str) -> tuple[str | int, ...]:
        """Where a weight stands in the nested state."""
        words = tuple(parameter.split(".")) if self.are_names_nested else (parameter,)
        return (*_words(self.weights), *words)

    def state_path(self, parameter: str, key: str) -> tuple[str | int, ...] | None:
        """Where what an optimizer keeps of a parameter stands; None where the format says that."""
        return None if self.are_names_nested else (*_words(self.optimizer), parameter, key)


def _words(prefix: str) -> tuple[str, ...]:
    return tuple(prefix.rstrip(".").split(".")) if prefix else ()


STYLES = {
    style.name: style
    for style in (
        TrainingStyle(
            "fsdp2",
            "PyTorch",
            "model.",
            "optim.state.",
            has_masters=False,
            keys=OPTIMIZER_KEYS,
            groups="optim.param_groups",
            are_groups_apart=True,
        ),
        TrainingStyle(
            "torch",
            "PyTorch",
            "model.",
            "optimizer.state.",
            has_masters=False,
            keys=OPTIMIZER_KEYS,
            groups="optimizer.param_groups",
            are_numbered=True,
        ),
        TrainingStyle(
            "reshard", "DeepSpeed", "", "optimizer.state.", groups="optimizer.param_groups"
        ),
        TrainingStyle(
            "megatron",
            "Megatron-core",
            "",
            "optimizer.state.",
            has_group_steps=True,
            groups="optimizer.param_groups",
        ),
        TrainingStyle(
            "optax",
            "Optax",
            "params.",
            "optimizer.state.",
            has_masters=False,
            step_type="int32",
            has_one_step=True,
            step_keys=frozenset({"exp_avg"}),
            keys=_OPTAX_KEYS,
            are_names_nested=True,
        ),
    )
}


def training_style(name: str) -> TrainingStyle:
    """The style of a name.

    Raises:
        UsageError: an unknown name; the known ones are listed.
    """
    if name not in STYLES:
        raise UsageError(f"training state as {name!r} keeps it; known are {', '.join(STYLES)}")
    return STYLES[name]
