"""Former keys of recipes and their present names: old recipes, runs and `--set` options are read with either.

Not from a paper. Fine-tuning once had its own schema for `optimisation`, with the learning rate next to a schedule that
was only a name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from bertkit.recipe.tree import Located

log = logging.getLogger(__name__)

_SECTION = "optimisation"
_SCHEDULE = "schedule"
_KEYS = {
    "learning_rate": "schedule.peak",
    "warmup_share": "schedule.warmup_share",
    "weight_decay": "optimizer.weight_decay",
    "max_steps": "steps",
}
"""Former and present keys of the section `optimisation`."""
_OF_EVERY_SCHEDULE = ("peak", "warmup_steps", "warmup_share")


def upgrade_keys(own: dict[str, Located], base: Located | None = None) -> dict[str, Located]:
    """The settings of one file with the present keys.

    Args:
        own: as they are written.
        base: the recipe that it extends; a schedule given only by name takes peak and warm-up from it.
    """
    section = own.get(_SECTION)
    if section is None or not isinstance(section.value, dict):
        return own
    old = {key: value for key, value in section.value.items() if key in _KEYS}
    new = {key: value for key, value in section.value.items() if key not in old}
    bare = new.get(_SCHEDULE)
    if bare is not None and isinstance(bare.value, str):
        old[_SCHEDULE] = bare
        new[_SCHEDULE] = schedule_of_name(bare, None if base is None else base.child(_SECTION))
    for key, value in old.items():
        if key == _SCHEDULE or value.value is None:
            continue
        part, _, name = _KEYS[key].partition(".")
        if name:
            whole = new.get(part)
            settings = whole.value if whole is not None and isinstance(whole.value, dict) else {}
            new[part] = Located({**settings, name: value}, value.place)
        else:
            new[part] = value
    if old:
        _log_renamed(tuple(old))
    return {**own, _SECTION: Located(new, section.place)}


def new_key(key: str) -> str:
    """The present name of a dotted key."""
    section, _, name = key.partition(".")
    if section != _SECTION or name not in _KEYS:
        return key
    _log_renamed((name,))
    return f"{_SECTION}.{_KEYS[name]}"


def is_bare_schedule(key: str, value: object) -> bool:
    """Whether an override sets a schedule's name and nothing else of it."""
    return key == f"{_SECTION}.{_SCHEDULE}" and isinstance(value, str)


def schedule_of_name(name: Located, section: Located | None) -> Located:
    """A schedule of this name with peak and warm-up of the schedule in `section`, another recipe's optimisation."""
    before = None if section is None else section.child(_SCHEDULE)
    settings = before.value if before is not None and isinstance(before.value, dict) else {}
    kept = {key: value for key, value in settings.items() if key in _OF_EVERY_SCHEDULE}
    return Located({"name": name, **kept}, name.place)


@cache
def _log_renamed(old: Iterable[str]) -> None:
    """Log once for the same keys, because a recipe is read several times."""
    names = {**_KEYS, _SCHEDULE: "schedule.name"}
    log.info(", ".join(f"{_SECTION}.{key} is now {_SECTION}.{names[key]}" for key in old))
