"""From a recipe's name to its tree of settings: find it, follow `extends`, apply `--set`, check it against a schema.

Not from a paper. Mappings of a recipe and of the one it extends are merged key by key; lists and scalars are replaced.
A mapping that chooses another variant by `name` (optimizer, schedule) replaces the whole mapping, because the other
variant's settings do not apply to it. `family` and `type` do not: a RoBERTa is a BERT except for its own settings.
Sibling dump.py writes a recipe back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from bertkit.errors import DataError, UsageError
from bertkit.files import open_regular, shown_path
from bertkit.recipe.errors import validate
from bertkit.recipe.find import SUFFIXES, find_recipe, recipe_names, shipped_directory
from bertkit.recipe.old_keys import is_bare_schedule, new_key, schedule_of_name, upgrade_keys
from bertkit.recipe.tree import MAX_CHARACTERS, MAX_DEPTH, VARIANT_KEY, Located, read_tree
from bertkit.visible import shell_word

Model = TypeVar("Model", bound=BaseModel)

_BLOCKS = ("|", ">")
_LONGEST_SHOWN = 60
"""Maximum number of characters of an override repeated in an error."""

MAX_CHAIN = 32
"""Maximum number of recipes that extend one another."""

_OF_RECIPES = frozenset(
    {
        *("kind", "extends", "paper", "arxiv", "seed", "tokenizer", "data", "model"),
        *("objective", "optimisation", "engine", "task", "student", "teacher", "distillation", "method", "init"),
    }
)
"""Keys of which every recipe has at least one; old_keys.py has the former ones."""

HEADER = ("name", "kind", "title", "paper", "arxiv")
DEFAULT_KIND: Final = "pretrain"
"""The kind of a recipe that does not give one."""
KINDS = {
    "pretrain": "bertkit.pretraining.recipe",
    "finetune": "bertkit.finetuning.recipe",
    "distill": "bertkit.distillation.recipe",
    "study": "bertkit.study.settings",
}
"""Commands that run recipes, each with the module whose `from_tree` makes a recipe of resolved settings. The modules
import torch, so they are imported only when the kind is known."""


@dataclass(frozen=True)
class Override:
    """One setting that replaces the recipe's.

    Attributes:
        key: dotted, such as `optimisation.steps`.
        value: plain data, as parsed from YAML.
        place: where it was written, for messages.
    """

    key: str
    value: Any
    place: str = "the recipe"

    @classmethod
    def parse(cls, text: str, option: str = "--set") -> Override:
        """Parse `KEY=VALUE`, as `--set` takes it; VALUE is YAML. Messages name the option.

        Raises:
            UsageError: it has another form, or VALUE is not YAML.
        """
        place = f"{option} {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '...'}"
        key, equals, value = text.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UsageError(f"{place}: expected KEY=VALUE with a dotted key, such as optimisation.steps=1000")
        if value.strip() in _BLOCKS:  # in YAML these begin a text of several lines, but there is only one line here
            return cls(key.strip(), value.strip(), place)
        try:
            return cls(key.strip(), read_tree(value, place).plain(), place)
        except UsageError as error:
            raise UsageError(f"{error}; put text with YAML characters in quotes: {option} \"{key}='...'\"") from None

    def __str__(self) -> str:
        """In the form that `--set` takes."""
        return f"{self.key}={json.dumps(self.value, ensure_ascii=False)}"


def overrides_of(values: Mapping[str, Any]) -> list[Override]:
    """Values by their dotted keys, as overrides."""
    return [Override(key, value) for key, value in values.items()]


def load_as(schema: type[Model], name: str, overrides: Sequence[Override] = ()) -> Model:
    """The recipe of that name or path as an object of this class, with overrides applied.

    Raises:
        UsageError: no such recipe, not YAML, a cycle of `extends`, a recipe of another kind, or errors in the settings
            (all of them at once).
    """
    tree = resolve_recipe(name, overrides)
    wanted = schema.model_fields.get("kind")
    if wanted is not None and wanted.default in KINDS:  # the kind of a task is something different
        require_kind(tree, name, wanted.default)
    return validate(tree, schema)


def load_any(name: str, overrides: Sequence[Override] = ()) -> Any:
    """The recipe of that name or path, of any kind; a recipe on a task is completed if it names task and models.

    Raises:
        UsageError: no such recipe, or errors in the settings (all of them at once).
    """
    tree = resolve_recipe(name, overrides)
    return import_module(KINDS.get(kind_of(tree), KINDS[DEFAULT_KIND])).from_tree(tree)


def kind_of(tree: Located) -> Any:
    """The command that runs a recipe; invalid values are left to the schema to refuse."""
    kind = tree.child("kind")
    return kind.value if kind is not None and isinstance(kind.value, str) else DEFAULT_KIND


def require_kind(tree: Located, name: str, wanted: str) -> None:
    """Refuse a recipe that another command runs; unknown kinds are left to the schema to refuse.

    Raises:
        UsageError: the recipe is of another kind.
    """
    found = kind_of(tree)
    if found != wanted and found in KINDS:
        remedy = f"run it with `bertkit {found} {shell_word(name)}`"
        raise UsageError(f"{name} is a recipe of kind {found}, not {wanted}: {remedy}")


def with_overrides(recipe: Model, overrides: Sequence[Override]) -> Model:
    """A copy of a loaded recipe with overrides applied.

    Raises:
        UsageError: the result has errors, reported all at once.
    """
    tree = Located.of(recipe.model_dump(mode="json"), "the recipe")
    return validate(with_values(tree, overrides), type(recipe))


def resolve_recipe(name: str, overrides: Sequence[Override] = ()) -> Located:
    """The tree of a recipe with `extends` followed and overrides applied, not yet checked."""
    return with_values(_named(find_recipe(name)), overrides)


def with_values(tree: Located, overrides: Sequence[Override]) -> Located:
    """A copy of a tree with overrides applied, in order; see `_sections_first`.

    Raises:
        UsageError: a key names an item that a list does not have, or has too many parts.
    """
    for override in _sections_first(overrides):
        keys, value = new_key(override.key).split("."), Located.of(override.value, override.place)
        if len(keys) > MAX_DEPTH:
            raise UsageError(f"{override.place}: a key of {len(keys):,} parts; recipes have at most {MAX_DEPTH} levels")
        if is_bare_schedule(override.key, override.value):
            value = schedule_of_name(value, tree.child(keys[0]))
        tree = _replaced(tree, keys, value, keys)
    return tree


def _sections_first(overrides: Sequence[Override]) -> list[Override]:
    """The overrides in order, except that an option such as --lr follows a later --set of its section, which would undo
    it."""

    def is_undone(number: int) -> bool:
        own = overrides[number]
        is_option = own.place.startswith("--") and not own.place.startswith("--set")
        after = (new_key(each.key) for each in overrides[number + 1 :])
        return is_option and any(new_key(own.key).startswith(f"{key}.") for key in after)

    undone = [is_undone(number) for number in range(len(overrides))]
    return [each for last in (False, True) for each, own in zip(overrides, undone, strict=True) if own is last]


def base_of(name: str) -> dict[str, Any]:
    """The settings that the user did not write, as plain data: a shipped recipe's own, or those of the recipe that the
    user's own recipe extends; empty if it extends none."""
    path = find_recipe(name)
    if path.resolve().parent != shipped_directory().resolve():
        extends = _read(path).child("extends")
        if extends is None:
            return {}
        path = find_recipe(str(extends.value), path)
    plain: dict[str, Any] = _with_bases(path, ()).plain()
    return plain


def _named(path: Path) -> Located:
    """A file's tree with its bases merged in, named after the file if it has no name of its own."""
    tree = _with_bases(path, ())
    assert isinstance(tree.value, dict)
    return Located({"name": Located(path.stem, tree.place), **tree.value}, tree.place)


def shipped_headers() -> list[dict[str, Any]]:
    """The fields shown by `recipes list` for each shipped recipe: name, kind, title, paper, arxiv; None if missing."""
    trees = [_named(shipped_directory() / f"{name}.yaml") for name in recipe_names()]
    found = [{key: child.plain() if (child := tree.child(key)) else None for key in HEADER} for tree in trees]
    return [{**each, "kind": each["kind"] or DEFAULT_KIND} for each in found]


def _read_base(path: Path) -> Located:
    """A file that another recipe names in `extends`.

    The recipe may come from another person and name one of the user's private files that is not a recipe. An error
    therefore repeats nothing of the file's contents.

    Raises:
        UsageError: it is not a recipe.
    """
    shown = shown_path(path)
    what = f"{shown}: extends names this file, which is not a recipe"
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{what}: a recipe's name ends in {' or '.join(SUFFIXES)}")
    try:
        tree = _read(path)
    except UsageError:
        # Without the original error, which quotes the file.
        raise UsageError(f"{what}; `bertkit recipes show {shell_word(shown)}` shows its errors") from None
    assert isinstance(tree.value, dict)
    if not _OF_RECIPES & tree.value.keys():
        raise UsageError(f"{what}: it has none of the keys {', '.join(sorted(_OF_RECIPES))}")
    return tree


def _read(path: Path) -> Located:
    shown = shown_path(path)
    try:
        with open_regular(path) as file:
            text = file.read(4 * MAX_CHARACTERS + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown}: not UTF-8 text (byte {error.start}); is it a recipe?") from None
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror}") from None
    except DataError:
        raise UsageError(f"{shown}: not a regular file; expected a recipe") from None
    tree = read_tree(text, shown)
    if not isinstance(tree.value, dict):
        found = "empty" if tree.value is None else f"a {type(tree.value).__name__}"
        raise UsageError(f"{shown}: a recipe is a mapping of keys to values; this is {found}")
    return tree


def _with_bases(path: Path, chain: tuple[Path, ...]) -> Located:
    real = path.resolve()
    if len(chain) > MAX_CHAIN:
        raise UsageError(
            f"{shown_path(chain[0])}: more than {MAX_CHAIN} recipes extend one another; merge some of them"
        )
    if real in chain:
        circle = " -> ".join(shown_path(each) for each in [*chain[chain.index(real) :], real])
        raise UsageError(f"extends goes in a circle: {circle}")
    tree = _read_base(path) if chain else _read(path)
    assert isinstance(tree.value, dict)
    own = dict(tree.value)
    base_name = own.pop("extends", None)
    if base_name is None:
        return Located(upgrade_keys(own), tree.place)
    if not isinstance(base_name.value, str):
        raise UsageError(f"{base_name.place}: extends: expected the name of one recipe, got {base_name.plain()!r}")
    base = _with_bases(find_recipe(base_name.value, path), (*chain, real))
    assert isinstance(base.value, dict)
    inherited = {key: value for key, value in base.value.items() if key != "name"}
    return Located(_merged(inherited, upgrade_keys(own, base)), tree.place)


def _merged(base: dict[str, Located], own: dict[str, Located]) -> dict[str, Located]:
    result = dict(base)
    for key, value in own.items():
        below = base[key].value if key in base else None
        if isinstance(below, dict) and isinstance(value.value, dict) and not _another_variant(below, value.value):
            result[key] = Located(_merged(below, value.value), value.place)
        else:
            result[key] = value
    return result


def _another_variant(base: dict[str, Located], own: dict[str, Located]) -> bool:
    return VARIANT_KEY in own and VARIANT_KEY in base and own[VARIANT_KEY].value != base[VARIANT_KEY].value


_STAGES = ("optimisation", "stages")


def _replaced(tree: Located, keys: Sequence[str], value: Located, whole: Sequence[str]) -> Located:
    """A copy of the tree with the value at `keys`; missing mappings on the way are created."""
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if first == "set" and rest and tuple(whole[:2]) == _STAGES and len(whole) - len(keys) == 3:
        rest = (".".join(rest),)  # a stage's own keys are dotted
    if isinstance(tree.value, list):
        items = list(tree.value)
        index = _index(items, first, value.place, whole[: len(whole) - len(keys)])
        if first.isdecimal():
            items[index] = _replaced(items[index], rest, value, whole)
        else:  # a word names an item of single-key mappings, and is the first key inside it
            items[index] = _replaced(_as_mapping(items[index]), keys, value, whole)
        return Located(items, tree.place)
    mapping = dict(tree.value) if isinstance(tree.value, dict) else {}
    mapping[first] = _replaced(mapping.get(first, Located(None, value.place)), rest, value, whole)
    return Located(mapping, tree.place if isinstance(tree.value, dict) else value.place)


def _as_mapping(item: Located) -> Located:
    """An item of a list of named settings as a mapping, even if it is only a name."""
    return Located({item.value: Located(None, item.place)}, item.place) if isinstance(item.value, str) else item


def _index(items: Sequence[Located], key: str, place: str, parent: Sequence[str]) -> int:
    names = [next(iter(item.value), "") if isinstance(item.value, dict) else str(item.plain()) for item in items]
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    if key in names:
        return names.index(key)
    near = get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join(names)}"
    raise UsageError(f"{place}: the list {'.'.join(parent)} has no {key!r}; {hint}")
