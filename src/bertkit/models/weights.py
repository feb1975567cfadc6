"""The mapping between a model's weights and those in Hub files.

A family defines a table from module names to Hub names, in which `{n}`, or any other name in braces, is a number, and
`TensorLayout`s for tensors that the Hub fuses, splits or transposes. This file applies both in either direction, and
reports which weights are missing, unexpected, tied, of a different shape or newly initialised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bertkit.errors import DataError, UsageError

Names = Mapping[str, str]
_PLACEHOLDER = re.compile(r"\\\{(\w+)\\\}")


def prefixed(names: Names, here: str, hub: str) -> dict[str, str]:
    """The table with a prefix for names on both sides."""
    return {(here + name).rstrip("."): (hub + hub_name).rstrip(".") for name, hub_name in names.items()}


def attention_names(
    hub: str, query: str, key: str, value: str, output: str, *, here: str = "layers.{n}.attention."
) -> dict[str, str]:
    """The table of an attention's maps, given their names below `hub`."""
    return prefixed({"query": query, "key": key, "value": value, "output": output}, here, hub)


def to_hub_names(parameters: Iterable[str], names: Names) -> dict[str, str]:
    """The Hub's name of every parameter; the longest matching module name applies.

    Raises:
        KeyError: a parameter is not in any module of the table.
    """
    longest_first = sorted(names.items(), key=lambda pair: -len(pair[0]))
    rules = [(re.compile(_pattern(here) + r"\.(?P<leaf>\w+)"), hub) for here, hub in longest_first]
    found: dict[str, str] = {}
    for parameter in parameters:
        for rule, hub in rules:
            match = rule.fullmatch(parameter)
            if match:
                numbers = {name: number for name, number in match.groupdict().items() if name != "leaf"}
                found[parameter] = f"{hub.format(**numbers)}.{match['leaf']}"
                break
        else:
            raise KeyError(f"no Hub name for parameter {parameter}")
    return found


def _pattern(name: str) -> str:
    return _PLACEHOLDER.sub(r"(?P<\1>\\d+)", re.escape(name))


@dataclass(frozen=True)
class TensorLayout:
    """One tensor on the Hub that corresponds to one or several parameters here, in another form.

    Attributes:
        hub: the tensor's name on the Hub, with placeholders: `h.{n}.attn.c_attn.weight`.
        parts: the names of the parameters in the table of names; they exist only in this package.
        split: from the Hub's tensor to the parts, in their order.
        join: its inverse.
    """

    hub: str
    parts: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]

    def below(self, prefix: str) -> TensorLayout:
        return replace(self, hub=prefix + self.hub, parts=tuple(prefix + part for part in self.parts))


def transposed(hub: str) -> TensorLayout:
    """A matrix that is (inputs, outputs) on the Hub and (outputs, inputs) in a linear layer here."""
    return TensorLayout(hub, (hub,), lambda whole: (whole.t(),), lambda parts: parts[0].t())


def stacked(hub: str, parts: Sequence[str], *, inputs_first: bool = False) -> TensorLayout:
    """Parts of equal size, such as query, key and value, concatenated along the outputs.

    Args:
        hub: the whole tensor's name.
        parts: names of the parts, in order.
        inputs_first: whether the whole is a matrix (inputs, outputs).
    """

    def split(whole: Tensor) -> Sequence[Tensor]:
        return (whole.t() if inputs_first else whole).chunk(len(parts))

    def join(tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(tensors))
        return whole.t() if inputs_first else whole

    return TensorLayout(hub, tuple(parts), split, join)


def renamed(
    tensors: Mapping[str, Tensor], rules: Iterable[tuple[str, str]], whole: str, parts: Sequence[str]
) -> dict[str, Tensor]:
    """The tensors of a file under other names.

    Args:
        tensors: by name.
        rules: regular expressions and what replaces their matches, applied in this order.
        whole: the part of a name that marks a tensor with the rows of several modules.
        parts: what replaces it in the names of these modules, in order.
    """
    found: dict[str, Tensor] = {}
    for old_name, tensor in tensors.items():
        name = old_name
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if whole in name:
            split = zip(parts, tensor.chunk(len(parts)), strict=True)
            found |= {name.replace(whole, part): rows for part, rows in split}
        else:
            found[name] = tensor
    return found


@dataclass(frozen=True)
class HubForm:
    """The form of a model's parameters in a Hub file.

    Attributes:
        names: from module names here to module names in the file.
        layouts: tensors that have another form in the file.
        tied: tensors that a file may contain as copies of others, by name, with the other's name; loading checks them,
            saving omits them.
        copies: likewise, but saving writes them, since the Hub's class does not tie them.
    """

    names: Names
    layouts: Sequence[TensorLayout] = ()
    tied: Names = field(default_factory=dict)
    copies: Names = field(default_factory=dict)

    def hub_names(self, parameters: Iterable[str]) -> dict[str, str]:
        """The Hub tensor that contains each parameter."""
        plain = to_hub_names(parameters, self.names)
        whole = {part: layout.hub for layout in self._bound(plain.values()) for part in layout.parts}
        return {name: whole.get(hub_name, hub_name) for name, hub_name in plain.items()}

    def check_distinct(self, state: Mapping[str, Tensor]) -> None:
        """Check that no two parameters are one tensor in a file, as heads of two Hub classes can be.

        Raises:
            UsageError: a file has one place for two different tensors.
        """
        first: dict[str, str] = {}
        for name, hub in to_hub_names(state, self.names).items():
            other = first.setdefault(hub, name)
            if other != name and not torch.equal(state[other], state[name]):
                raise UsageError(
                    f"{other} and {name} have one name in Hub files, {hub}, so that one of them would be lost; save a"
                    " model for each head"
                )

    def to_hub(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors of a file, except the tied ones; copies of those that the state has."""
        plain = to_hub_names(state, self.names)
        tensors = {plain[name]: tensor for name, tensor in state.items()}
        for layout in self._bound(list(tensors)):
            tensors[layout.hub] = layout.join([tensors.pop(part) for part in layout.parts])
        copies = {copy: tensors[source] for copy, source in self.copies.items() if source in tensors}
        return {**tensors, **copies}

    def from_hub(self, tensors: Mapping[str, Tensor], parameters: Iterable[str]) -> dict[str, Tensor]:
        """The parameters whose tensor is present; tensors must have the Hub's shapes."""
        plain = to_hub_names(parameters, self.names)
        parts = dict(tensors)
        for layout in self._bound(plain.values()):
            if layout.hub in tensors:
                del parts[layout.hub]
                parts.update(zip(layout.parts, layout.split(tensors[layout.hub]), strict=True))
        return {name: parts[hub_name] for name, hub_name in plain.items() if hub_name in parts}

    def _bound(self, plain_names: Iterable[str]) -> list[TensorLayout]:
        """The layouts with placeholders filled in, one for each set of numbers among the parameters."""
        plain_names = list(plain_names)
        bound = []
        for layout in self.layouts:
            rule = re.compile(_pattern(layout.parts[0]))
            for match in filter(None, map(rule.fullmatch, plain_names)):
                numbers = match.groupdict()
                parts = tuple(part.format(**numbers) for part in layout.parts)
                bound.append(replace(layout, hub=layout.hub.format(**numbers), parts=parts))
        return bound


@dataclass
class WeightReport:
    """What happened to the weights of a loaded model; weights have their Hub names.

    Attributes:
        loaded: read from the file.
        missing: in the model, but not in the file; initialised if they belong to a head.
        unexpected: in the file, but not in the model.
        tied: in the file as a copy of another tensor.
        reinitialised: in the file with a shape for other labels; initialised.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)
    reinitialised: list[str] = field(default_factory=list)

    @property
    def newly_initialised(self) -> list[str]:
        return sorted([*self.missing, *self.reinitialised])


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], form: HubForm, report: WeightReport) -> None:
    """Copy tensors under Hub names into the module.

    Args:
        module: receives the tensors; parameters that are not loaded by the report are not changed.
        tensors: tensors by Hub name.
        form: form of the module in a file.
        report: from `compare_weights`.
    """
    state, tensors = module.state_dict(), _with_originals(tensors, form)
    for name, tensor in form.from_hub({name: tensors[name] for name in report.loaded}, state).items():
        state[name].copy_(tensor)


def _with_originals(tensors: Mapping[str, Tensor], form: HubForm) -> Mapping[str, Tensor]:
    # A file may contain a tied tensor under either of its two names.
    kept = {
        original: tensors[copy] for copy, original in form.tied.items() if copy in tensors and original not in tensors
    }
    return {**tensors, **kept}


def compare_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], form: HubForm, *, source: str, may_differ: Collection[str] = ()
) -> WeightReport:
    """What `load_weights` does with these tensors. Nothing is changed, and the module may be on the meta device.

    Args:
        module, tensors, form: as for `load_weights`.
        source: the file, for messages.
        may_differ: parameters of the module (names here) that are not loaded if the file's shape differs.

    Raises:
        DataError: tensors differ in shape from their parameters (all are listed), or a copy of a tied tensor differs
            from it.
    """
    state = module.state_dict()
    hub_names = form.hub_names(state)
    tensors = _with_originals(tensors, form)
    with torch.device("meta"):
        on_meta = {name: tensor.to("meta") for name, tensor in state.items()}
        shapes = {name: tensor.shape for name, tensor in form.to_hub(on_meta).items()}
    report = WeightReport(tied=_checked_copies(tensors, form, source))
    report.unexpected = sorted(set(tensors) - set(shapes) - set(report.tied))
    open_names = {hub_names[name] for name in may_differ}
    errors = []
    for hub_name in dict.fromkeys(hub_names.values()):
        if hub_name not in tensors:
            report.missing.append(hub_name)
        elif tensors[hub_name].shape == shapes[hub_name]:
            report.loaded.append(hub_name)
        elif hub_name in open_names:
            report.reinitialised.append(hub_name)
        else:
            shape, wanted = tuple(tensors[hub_name].shape), tuple(shapes[hub_name])
            errors.append(f"{hub_name} has shape {shape}, but the configuration requires {wanted}")
    if errors:
        raise DataError(f"{source}: " + "; ".join(errors))
    return report


def _checked_copies(tensors: Mapping[str, Tensor], form: HubForm, source: str) -> list[str]:
    """The copies that a file contains.

    Raises:
        DataError: a copy differs from its original.
    """
    copies = {**form.tied, **form.copies}
    found = sorted(name for name in copies if name in tensors and copies[name] in tensors)
    for name in found:
        if not torch.equal(tensors[name], tensors[copies[name]]):
            raise DataError(
                f"{source}: {name} differs from {copies[name]}, but the model has one weight for both; a checkpoint"
                " with untied weights is not supported"
            )
    return found
