"""Options of the command line, generated from settings classes, as the signature that typer reads.

A command is a plain function whose parameters define its options:

    def mlm(
        model: Model = None,
        *,
        settings: Annotated[MlmSettings, spelled(pseudo_sequences="--pseudo N")],
        common: Measuring,
    ) -> None: ...

`model` is an option written out. `settings` stands for one option per field of the class, with the field's name, type,
range, default and help; the command gets a validated instance. `common` is a dataclass of `Options`, with one option
per field, its own before those of its base class. `typer_signature` turns the function into one that typer can read.
Sibling options.py has the options that many commands share. Settings classes are imported here only when needed.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from bertkit.errors import UsageError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from bertkit.settings import Settings

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_BOUNDS = ("ge", "gt", "le", "lt")

_Gather = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Builds the arguments of a command from the values of its options."""


@dataclass(frozen=True)
class Options:
    """Options that belong together. A field has the annotation and default of a command's parameter."""


@dataclass(frozen=True)
class Spelling:
    """How the options of a settings class are written if they differ from the fields' names.

    Attributes:
        options: `--option METAVAR` of a field; a metavar with a comma (`N,N`) stands for a list in one value.
        without: fields that have no option.
        panel: heading of these options on the help page.
        old: renamed options, each with its new name; still accepted.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()
    panel: str | None = None
    old: Mapping[str, str] = field(default_factory=dict)


def spelled(
    *,
    without: Collection[str] = (),
    panel: str | None = None,
    old: Mapping[str, str] | None = None,
    **options: str,
) -> Spelling:
    """`Annotated[PairSettings, spelled(only="--only PATTERN")]`: see `Spelling`."""
    return Spelling(options, without, panel, old or {})


@dataclass(frozen=True)
class FromField:
    """One option generated from a field of a settings class; None if it is not given.

    Attributes:
        schema: the class that has the field, as `module:Class`; imported when the option is made.
        key: the recipe's dotted key that it overrides; the last part is the field.
        spelling: `--option METAVAR` if it differs from the field's name.
        panel: heading on the help page.
        shows_default: whether the help page shows the field's default, which a recipe may change.
    """

    schema: str
    key: str
    spelling: str = ""
    panel: str | None = None
    shows_default: bool = False

    def generated(self) -> _GeneratedOption:
        """The option."""
        module, _, name = self.schema.partition(":")
        leaf = self.key.rpartition(".")[2]
        info = getattr(import_module(module), name).model_fields[leaf]
        shown = info.default if self.shows_default else None
        return _GeneratedOption((leaf,), info, self.spelling, self.panel, shown, has_default=False)


@dataclass(frozen=True)
class _GeneratedOption:
    """The option of a field of a settings class.

    Attributes:
        path: the field's name, after those of the settings that it is nested in.
        info: the field.
        spelling: `--option METAVAR`; empty for the field's name.
        panel: heading on the help page.
        shown_default: what the help page shows if the option's default is None.
        has_default: whether the option has the field's default; otherwise its default is None, and no option is
            required.
    """

    path: tuple[str, ...]
    info: FieldInfo
    spelling: str
    panel: str | None
    shown_default: str | None
    has_default: bool = True

    @property
    def flag(self) -> str:
        """The option as the user writes it, such as `--max-epochs`."""
        return self.spelling.partition(" ")[0] or f"--{self.path[-1].replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """The value's placeholder on the help page; empty for that of its type."""
        return self.spelling.partition(" ")[2]

    @property
    def default(self) -> Any:
        """The value if the option is not given."""
        if not self.has_default:
            return None
        if self.info.is_required():
            return inspect.Parameter.empty
        value = self.info.get_default(call_default_factory=True)
        if isinstance(value, list | tuple):
            return ",".join(map(str, value)) if value and self.in_one_value else None
        return value

    @property
    def is_list(self) -> bool:
        return get_origin(_plain_type(self.info.annotation, [])[0]) in (list, tuple)

    @property
    def in_one_value(self) -> bool:
        """Whether commas separate the items of a list in one value."""
        return self.is_list and "," in self.metavar

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as typer reads it."""
        kind, constraints = self._item()
        bounds = {name: getattr(each, name) for each in constraints for name in _BOUNDS if hasattr(each, name)}
        if kind is int:
            bounds |= {"ge": bounds["gt"] + 1} if "gt" in bounds else {}
            bounds |= {"le": bounds["lt"] - 1} if "lt" in bounds else {}
        if self.in_one_value or kind not in (int, float):
            bounds = {}  # for items of a list in one value, pydantic checks them
        default, repeats = self.default, self.is_list and not self.in_one_value
        is_number_or_text = isinstance(default, int | float | str) and not isinstance(default, bool)
        option = typer.Option(
            self.flag,
            help=escaped(f"{self.info.description or ''}{' Repeatable.' if repeats else ''}"),
            metavar="" if kind is bool else self.metavar or _METAVARS.get(kind),
            min=bounds.get("ge"),
            max=bounds.get("le"),
            show_default=(is_number_or_text and default != "") or self.shown_default or False,
            rich_help_panel=self.panel,
        )
        typed: Any = str if self.in_one_value or _is_union(kind) else kind
        typed = list[typed] if repeats else typed
        typed = typed | None if default is None else typed
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, option]
        )

    def value(self, given: Any) -> Any:
        """The given value as plain data of the field's type.

        Raises:
            UsageError: a number with too many digits.
        """
        from bertkit.recipe.tree import plain_scalar

        kind, _ = self._item()
        if given is None:
            return None
        try:
            if self.in_one_value:
                parts = list(dict.fromkeys(part.strip() for part in given.split(",")))
                return parts if kind is str else [plain_scalar(part) for part in parts]
            if _is_union(kind):
                return plain_scalar(given)
        except ValueError as error:
            raise UsageError(f"{self.flag}: {error}") from error
        return str(given) if isinstance(given, Path) else given

    def _item(self) -> tuple[Any, list[Any]]:
        """The type of a value, or of each of several, and its constraints; `int | str` for YAML."""
        kind, constraints = _plain_type(self.info.annotation, self.info.metadata)
        if self.is_list:
            kind, constraints = _plain_type(get_args(kind)[0], [])
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if not all(isinstance(choice, str) for choice in choices):
            kind = int if all(isinstance(choice, int) for choice in choices) else int | str
        return kind, constraints


def escaped(text: str) -> str:
    """Help text with brackets escaped that rich would read as markup, such as `[start, end]`."""
    return re.sub(r"\[(?=[a-z#/@])", r"\\[", text)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _plain_type(annotation: Any, constraints: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A type without `| None` and `Annotated`, and the constraints on its values."""
    found = list(constraints)
    if get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        found += [each for one in extra for each in getattr(one, "metadata", [one])]
    if _is_union(annotation):
        rest = [each for each in get_args(annotation) if each is not NoneType]
        if len(rest) == 1:
            return _plain_type(rest[0], found)
    return annotation, found


def _generated_options(
    schema: type[Settings], spelling: Spelling, outer: tuple[str, ...] = ()
) -> Iterator[_GeneratedOption]:
    """The options of a settings class, including those of nested settings."""
    for name, info in schema.model_fields.items():
        if name in spelling.without:
            continue
        kind, _ = _plain_type(info.annotation, [])
        if _is_settings(kind):
            yield from _generated_options(kind, spelling, (*outer, name))
        else:
            several = info.get_default(call_default_factory=True) if get_origin(kind) in (list, tuple) else None
            shown = " ".join(map(str, several)) if isinstance(several, list | tuple) else None
            yield _GeneratedOption((*outer, name), info, spelling.options.get(name, ""), spelling.panel, shown)


def _settings(schema: type[Settings], options: Mapping[str, _GeneratedOption], given: Mapping[str, Any]) -> Settings:
    """The given settings; a value equal to its default counts as not given.

    Raises:
        UsageError: a value is not valid.
    """
    from bertkit.recipe.errors import validate
    from bertkit.recipe.tree import Located

    tree: dict[str, Any] = {}
    for name, option in options.items():
        if given[name] in (None, []) or given[name] == option.default:
            continue
        inner = tree
        for part in option.path[:-1]:
            inner = inner.setdefault(part, {})
        inner[option.path[-1]] = Located.of(option.value(given[name]), option.flag)
    return validate(Located.of(tree, "the options"), schema, what="the command line", with_keys=False)


def typer_signature(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one keyword parameter per option."""
    parameters, gather = _spread(inspect.signature(command, eval_str=True).parameters.values())

    @functools.wraps(command)
    def of_single_options(**given: Any) -> None:
        command(**gather(given))

    of_single_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    return of_single_options


def old_spellings(command: Callable[..., None]) -> dict[str, str]:
    """The renamed options of a command, each with its new name."""
    hints = inspect.get_annotations(command, eval_str=True).values()
    spellings = [each for hint in hints for each in get_args(hint) if isinstance(each, Spelling)]
    return {old: new for spelling in spellings for old, new in spelling.old.items()}


def _spread(declared: Iterable[inspect.Parameter]) -> tuple[list[inspect.Parameter], _Gather]:
    """One parameter per option, and the function that builds their values from the options' values."""
    parameters: list[inspect.Parameter] = []
    makers: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
    for parameter in declared:
        options, makers[parameter.name] = _options_of(parameter)
        parameters += options
    return parameters, lambda given: {name: make(given) for name, make in makers.items()}


def _options_of(parameter: inspect.Parameter) -> tuple[list[inspect.Parameter], Callable[[Mapping[str, Any]], Any]]:
    """The options of one parameter, and the function that builds its value from theirs."""
    name, (kind, *metadata) = parameter.name, annotation_parts(parameter.annotation)
    if isinstance(kind, type) and issubclass(kind, Options):
        parameters, gather = _spread(fields_of(kind))
        return parameters, lambda given: kind(**gather(given))
    if _is_settings(kind):
        spelling = next((each for each in metadata if isinstance(each, Spelling)), Spelling())
        options = {f"{name}__{'__'.join(each.path)}": each for each in _generated_options(kind, spelling)}
        parameters = [option.parameter(key) for key, option in options.items()]
        return parameters, lambda given: _settings(kind, options, given)
    if from_field := next((each for each in metadata if isinstance(each, FromField)), None):
        option = from_field.generated()
        return [option.parameter(name)], lambda given: option.value(given[name])
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)], operator.itemgetter(name)


def annotation_parts(annotation: Any) -> tuple[Any, ...]:
    """A type and the metadata of `Annotated`."""
    return get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)


def _is_settings(kind: Any) -> bool:
    if "pydantic" not in sys.modules:  # then no such class exists yet
        return False
    from bertkit.settings import Settings

    return isinstance(kind, type) and issubclass(kind, Settings)


def fields_of(kind: type[Options]) -> list[inspect.Parameter]:
    """The fields of a class of options as parameters, its own before those of its base class."""
    defaults = {each.name: each.default for each in fields(kind)}
    annotations: dict[str, Any] = {}
    for layer in kind.__mro__:
        for name, annotation in inspect.get_annotations(layer, eval_str=True).items():
            annotations.setdefault(name, annotation)  # a class may redefine a field of its base class
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in annotations.items()
    ]
