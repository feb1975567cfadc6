"""The schema of a study file, a YAML of kind `study`: arms, budget, how settings are chosen, seeds, measures, claims.

Every arm gets the same budget of training FLOPs (or tokens, or steps). Its settings are chosen among equally many
candidates on a separate seed, and fresh seeds are scored. Claims are decided by the paired differences over these seeds
(results.py).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bertkit.errors import UsageError
from bertkit.jobs.settings import ExecutorSettings
from bertkit.recipe.errors import validate
from bertkit.recipe.header import RecipeHeader
from bertkit.recipe.resolve import Override, kind_of, require_kind, resolve_recipe, with_values
from bertkit.recipe.tree import Located
from bertkit.settings import Settings
from bertkit.study.measure_settings import AnyMeasure

log = logging.getLogger(__name__)

KIND: Final = "study"
OWN_KEYS = {
    "seed": "seeds and choose.seed",
    "optimisation.steps": "budget",
    "name": "the arms' names",
    "kind": "the recipe",
}
"""Keys of a recipe that the study sets, and the setting it takes them from."""
_DOTTED = re.compile(r"(set|choose\.grid|arms\.[^.]+\.(?:set|grid)|measures\.[^.]+\.set)\.(.+)")
"""Mappings with dotted recipe keys as keys."""

_REMOVABLE = {"arms": "arm", "measures": "measure"}
"""Mappings from which `--set NAME=null` removes an entry, and what an entry is called."""

SCORES = "scores.json"
"""The file with the scores of a run, next to the directories of its measures."""

Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]
Names = str | list[str]
"""One measure, or several to be averaged."""


class Budget(Settings):
    """What each run may cost: one of the three."""

    flops: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Training FLOPs of each run; a model that costs more per step takes fewer steps."
    )
    tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Number of tokens that each run reads.")
    steps: Annotated[int, Field(ge=1)] | None = Field(None, description="Number of updates of each run.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of flops, tokens and steps, and null for the others; found {given or 'none'}")
        return self

    @property
    def unit(self) -> str:
        """The unit of the budget."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def amount(self) -> float:
        """The amount in this unit."""
        return float(getattr(self, self.unit))


class Arm(Settings):
    """One variant that is compared: the recipe with these settings."""

    recipe: str | None = Field(None, description="Pretraining recipe that this arm starts from (default: the study's).")
    set: dict[str, Any] = Field(
        default_factory=dict, description="Settings by dotted key, applied after the study's own."
    )
    grid: Grid = Field(
        default_factory=dict,
        description="Further keys to choose, in all combinations with those of choose.grid. Such an arm has more"
        " candidates than the others, which the report states.",
    )
    budget_share: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Share of the budget that a run of this arm gets, such as 0.1 if it is to reach in a tenth of"
        " the FLOPs what the others reach.",
    )
    budget_shares: Annotated[list[Annotated[float, Field(gt=0, le=1000)]], Field(min_length=1)] | None = Field(
        None,
        description="Several shares of the budget: this arm is replaced by one arm per share, named ARM-SHARE. They"
        " are the points of a curve of scores by FLOPs.",
    )
    curve: str | None = Field(
        None, description="Curve that this arm is a point of (default: the arm's name, if it has budget_shares)."
    )
    frontier: str | None = Field(
        None,
        description="Frontier that this arm's curve belongs to: its curves are sizes of one model, and a power law"
        " is fitted through their best points (default: each curve is its own frontier).",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"recipe", "budget_share", "budget_shares", "curve", "frontier"})


class SettingChoice(Settings):
    """How an arm's settings are chosen: by one short run of each candidate."""

    grid: Grid = Field(description="Values to try, by dotted key, the same for every arm.")
    by: Names = Field(description="Measure that decides; of several, their mean decides.")
    budget_share: float = Field(0.25, gt=0, le=1, description="Share of the budget that each candidate gets.")
    seed: int = Field(100, ge=0, lt=2**32, description="Seed of the candidates; not one of the study's seeds.")

    @property
    def names(self) -> list[str]:
        """The measures that decide."""
        return names_of(self.by)


class Claim(Settings):
    """A hypothesis of a paper or of your own, as a difference between two arms that the study can decide."""

    claim: str = Field(description="What is claimed, in one sentence.")
    source: str = Field("", description="Authors, year, and place in the paper, if it is a paper's claim.")
    arm: str = Field(description="The arm that the claim is about.")
    against: str | None = Field(None, description="The arm that it is compared with (default: the baseline).")
    measure: Names = Field(description="Measure that decides; of several, their mean decides.")
    expects: Literal["higher", "lower"] = Field(
        "higher", description="Whether the claim expects the arm's score to be higher or lower than the other's."
    )
    margin: float = Field(
        0.0,
        ge=0,
        description="Difference in the opposite direction that the claim tolerates, for claims such as `no worse`.",
    )
    confidence: float = Field(
        0.95,
        ge=0.5,
        lt=1,
        description="Confidence level of the interval that decides; its two sides are equal, so 0.98 is p < 0.01 for"
        " the claim's side.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"confidence"})

    @property
    def names(self) -> list[str]:
        """The measures that decide."""
        return names_of(self.measure)


class StudyEngine(ExecutorSettings):
    """What does not change the results."""

    keep: Literal["scores", "models", "checkpoints"] = Field(
        "models",
        description="What remains on disk of a measured run, in addition to its record: only the scores; the models"
        " of the scored seeds; or all models and checkpoints.",
    )
    report_to: list[Literal["wandb", "mlflow"]] = Field(
        default_factory=list, description="Experiment trackers that each pretraining run is also reported to."
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"report_to"})


class Study(RecipeHeader):
    """A comparison, complete: carrying it out twice gives the same results."""

    kind: Literal["study"] = Field(KIND, description="The command that runs the file: `bertkit study`.")
    recipe: str = Field(description="Pretraining recipe that the arms start from.")
    set: dict[str, Any] = Field(default_factory=dict, description="Settings for all arms, by dotted key.")
    budget: Budget = Field(description="Budget of each run.")
    arms: dict[str, Arm] = Field(description="Arms to compare, by name.")
    choose: SettingChoice | None = Field(
        None, description="How each arm's settings are chosen (default: nothing is chosen)."
    )
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(
        description="Seeds of the scored runs, one run of each arm per seed."
    )
    measures: dict[str, AnyMeasure] = Field(
        min_length=1, description="Scores to compute for each finished run, by name."
    )
    baseline: str | None = Field(None, description="Arm that the others are compared with (default: the first).")
    claims: list[Claim] = Field(default_factory=list, description="Claims from papers to test.")
    engine: StudyEngine = Field(default_factory=StudyEngine, description="Settings that do not affect the results.")

    later_fields: ClassVar[frozenset[str]] = frozenset({"seed"})

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, data: Any) -> Any:
        """`--set measures.NAME=null` removes an entry, and the claims that need it."""
        if not isinstance(data, Mapping):
            return data
        entries = {key: data[key] for key in _REMOVABLE if isinstance(data.get(key), Mapping)}
        removed = {key: {name for name, entry in own.items() if entry is None} for key, own in entries.items()}
        if not any(removed.values()):
            return data
        kept = {key: {name: entry for name, entry in own.items() if entry is not None} for key, own in entries.items()}
        claims, baseline = data.get("claims"), data.get("baseline") or next(iter(entries.get("arms", ())), None)
        if isinstance(claims, list):
            meant = [_with_against(each, baseline) for each in claims]
            kept["claims"] = [each for each in meant if not _needs(each, removed)]  # type: ignore[assignment]  # a list among mappings
        return {**data, **kept}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        errors = [*self._seed_errors(), *self._grid_errors(), *self._name_errors(), *self._measure_errors()]
        if errors:
            raise ValueError("; ".join(errors))
        return self

    @property
    def against(self) -> str:
        """The baseline's name; empty if there are no arms."""
        return self.baseline or next(iter(self.arms), "")

    def _seed_errors(self) -> Iterable[str]:
        if self.seed:
            yield "seed has no effect in a study; write seeds, and choose.seed for the choice"
        repeated = [seed for seed, times in Counter(self.seeds).items() if times > 1]
        if repeated:
            yield f"seeds contains {repeated[0]} twice; every run needs its own seed"
        if not self.seeds:
            yield "seeds is empty; every arm needs at least one"
        elif len(self.seeds) < 2 and self.claims:
            yield "seeds has fewer than two entries, so there is no interval to decide a claim; add fresh seeds"
        if self.choose is not None and self.choose.seed in self.seeds:
            yield (
                f"seeds contains {self.choose.seed}, the seed that the settings are chosen on (choose.seed); a setting"
                " must not be scored on the seed that chose it: use another seed"
            )

    def _grid_errors(self) -> Iterable[str]:
        if not self.arms:
            yield "arms is empty; name at least one arm to train, such as `plain: {}`"
        for name in self.arms:
            if not re.fullmatch(r"[\w.+-]+", name):
                yield f"arms: the name {name!r} has characters other than letters, digits and _ . + -"
        places = {"set": self.set, **{f"arms.{name}.set": arm.set for name, arm in self.arms.items()}}
        grids = {f"arms.{name}.grid": arm.grid for name, arm in self.arms.items()}
        common = {} if self.choose is None else self.choose.grid
        if self.choose is not None:
            grids["choose.grid"] = common
            if not common:
                yield "choose.grid is empty; name a key and the values to try, or leave choose out"
        for place, keys in (places | grids).items():
            for key in keys:
                if key in OWN_KEYS:
                    yield f"{place}.{key} is set by the study, from {OWN_KEYS[key]}; leave it out"
        for place, grid in grids.items():
            if grid and self.choose is None:
                yield f"{place}: nothing chooses among these; add `choose`"
            for key, values in grid.items():
                if len(values) < 2:
                    yield f"{place}.{key} has one value, so there is nothing to choose; add others, or move it to `set`"
                elif any(value in values[:place_] for place_, value in enumerate(values)):
                    yield f"{place}.{key} contains a value twice"
        for name, arm in self.arms.items():
            if arm.budget_shares is not None:
                yield f"arms.{name}.budget_shares excludes budget_share; leave one of the two out"
            elif arm.frontier is not None and arm.curve is None:
                yield f"arms.{name}.frontier needs budget_shares or curve, which define its points"
            for key in common.keys() & arm.grid.keys():
                yield f"arms.{name}.grid.{key} is also a key of choose.grid; those values are the same for every arm"

    def _name_errors(self) -> Iterable[str]:
        if self.baseline is not None:
            yield from _unknown("baseline", [self.baseline], self.arms, "arm")
        if self.choose is not None:
            yield from _unknown("choose.by", self.choose.names, self.measures, "measure")
            yield from self._direction_errors("choose.by", self.choose.names)
        for number, claim in enumerate(self.claims):
            at, against = f"claims.{number}", claim.against or self.against
            yield from _unknown(f"{at}.arm", [claim.arm], self.arms, "arm")
            yield from _unknown(f"{at}.measure", claim.names, self.measures, "measure")
            yield from self._direction_errors(f"{at}.measure", claim.names)
            if claim.against is not None:
                yield from _unknown(f"{at}.against", [claim.against], self.arms, "arm")
            if claim.arm == against:
                yield f"{at}: {claim.arm} is compared with itself; name another arm in `against`"

    def _measure_errors(self) -> Iterable[str]:
        for name in self.measures:
            if "/" in name or "\0" in name or name in ("", ".", "..", SCORES):
                yield f"measures: the name {name!r} cannot be that of a directory in the study; choose another one"

    def _direction_errors(self, place: str, names: Sequence[str]) -> Iterable[str]:
        known = [self.measures[name] for name in names if name in self.measures]
        if len({measure.higher for measure in known}) > 1:
            yield f"{place}: the mean of {', '.join(names)} has no meaning: higher is better for one, lower for another"


def _with_against(claim: Any, baseline: Any) -> Any:
    """A claim with its `against` written out, so that it does not depend on which arm is first later."""
    return {**claim, "against": claim.get("against") or baseline} if isinstance(claim, Mapping) else claim


def _needs(claim: Any, removed: Mapping[str, set[str]]) -> bool:
    """Whether a claim names an arm or a measure that is removed."""
    if not isinstance(claim, Mapping):
        return False
    measures = claim.get("measure")
    named = {"arms": [claim.get("arm"), claim.get("against")]}
    named["measures"] = measures if isinstance(measures, list) else [measures]
    return any(isinstance(name, str) and name in gone for key, gone in removed.items() for name in named[key])


def names_of(names: Names) -> list[str]:
    """One name or several as a list."""
    return [names] if isinstance(names, str) else names


def _unknown(place: str, names: Sequence[str], known: Mapping[str, object], noun: str) -> Iterable[str]:
    if not names:
        yield f"{place} names no {noun}"
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            yield f"{place}: no {noun} {name!r}; {hint}"


def load_study(name: str, overrides: Sequence[Override] = (), *, arms: Sequence[str] = ()) -> Study:
    """The study with this name or path, with overrides applied.

    Args:
        name: a file, or the name of a shipped study.
        overrides: overrides of its settings; after `set` and `grid`, the rest of a key is one recipe key.
        arms: arms or curves to keep, with the claims about them; empty for all.

    Raises:
        UsageError: no such file, a file of another kind, or errors in it (all reported at once).
    """
    tree = resolve_recipe(name)
    for override in overrides:
        _check_removal(tree, override)
    tree = _with_overrides(tree, overrides)
    require_kind(tree, name, KIND)
    if kind_of(tree) != KIND:
        raise UsageError(f"{name}: kind is {kind_of(tree)!r}; a study file has the line `kind: {KIND}`")
    return from_tree(_with_arms(_with_points(tree), arms) if arms else tree)


def from_tree(tree: Located) -> Study:
    """The study with resolved settings.

    Raises:
        UsageError: errors in the settings, all reported at once.
    """
    return validate(_with_points(tree), Study, what="the study")


def changed_study(study: Study, overrides: Sequence[Override]) -> Study:
    """A copy with overrides applied.

    Raises:
        UsageError: errors in the result, all reported at once.
    """
    return from_tree(_with_overrides(Located.of(study.model_dump(mode="json"), "the study"), overrides))


def _with_overrides(tree: Located, overrides: Sequence[Override]) -> Located:
    for override in overrides:
        tree = with_values(tree, [_undotted(tree, override)])
    return tree


def _check_removal(tree: Located, override: Override) -> None:
    """Check that `measures.NAME=null` or `arms.NAME=null` removes an entry."""
    section, _, name = override.key.partition(".")
    if override.value is not None or section not in _REMOVABLE or not name or "." in name:
        return
    entries = tree.child(section)
    known = entries.value if entries is not None and isinstance(entries.value, dict) else {}
    for error in _unknown(override.place, [name], known, _REMOVABLE[section]):
        raise UsageError(error)


def _undotted(tree: Located, override: Override) -> Override:
    """`set.model.hidden_size=64` as an override of `set`, which itself has dotted keys."""
    found = _DOTTED.fullmatch(override.key)
    if found is None:
        return override
    place: Located | None = tree
    for part in found[1].split("."):
        place = None if place is None else place.child(part)
    given = place.value if place is not None and isinstance(place.value, dict) else {}
    return Override(found[1], {**given, found[2]: Located.of(override.value, override.place)}, override.place)


def _with_arms(tree: Located, names: Sequence[str]) -> Located:
    """Keep only these arms and the claims between them."""
    arms = tree.child("arms")
    known = arms.value if arms is not None and isinstance(arms.value, dict) else {}
    curves = {name: arm.plain().get("curve") if isinstance(arm.value, dict) else None for name, arm in known.items()}
    errors = list(_unknown("--arms", names, {**known, **dict.fromkeys(map(str, filter(None, curves.values())))}, "arm"))
    if errors:
        raise UsageError("; ".join(errors))
    assert arms is not None
    assert isinstance(tree.value, dict)
    kept = {name: arm for name, arm in known.items() if name in names or curves[name] in names}
    baseline, claims = tree.child("baseline"), tree.child("claims")
    against = next(iter(known)) if baseline is None or baseline.value is None else baseline.plain()
    if not isinstance(against, str):
        return tree  # validation reports it
    value = {**tree.value, "arms": Located(kept, arms.place)}
    if against not in kept:
        value["baseline"] = Located(next(iter(kept)), arms.place)
    if claims is not None and isinstance(claims.value, list):
        some = [each for each in claims.value if _arms_of(each, against) <= kept.keys()]
        value["claims"] = Located(some, claims.place)
        if left_out := [_in_words(each, against) for each in claims.value if each not in some]:
            log.info("--arms leaves out the claims about other arms: %s", "; ".join(dict.fromkeys(left_out)))
        for each in some:
            if isinstance(each.value, dict) and each.child("against") is None:
                each.value["against"] = Located(against, each.place)
    return Located(value, tree.place)


def _with_points(tree: Located) -> Located:
    """Replace an arm with `budget_shares` by one arm per share."""
    arms = tree.child("arms")
    if arms is None or not isinstance(arms.value, dict) or not isinstance(tree.value, dict):
        return tree
    points: dict[str, Located] = {}
    for name, arm in arms.value.items():
        shares = arm.child("budget_shares")
        if shares is None or not isinstance(shares.value, list) or not shares.value or "budget_share" in arm.plain():
            points[name] = arm  # errors in it are reported by validation
            continue
        assert isinstance(arm.value, dict)
        common = {"curve": Located(name, arm.place), **arm.value}
        del common["budget_shares"]
        for share in shares.value:
            point = f"{name}-{share.plain()}"
            if point in points or point in arms.value:
                raise UsageError(
                    f"{share.place}: arms.{name}.budget_shares: there is already an arm {point!r}; give each share"
                    " once, or rename the other arm"
                )
            points[point] = Located({**common, "budget_share": share}, arm.place)
    return Located({**tree.value, "arms": Located(points, arms.place)}, tree.place)


def _in_words(claim: Located, baseline: str) -> str:
    found = claim.plain()
    if not isinstance(found, dict):
        return str(found)
    measure = found.get("measure")
    names = " and ".join(map(str, measure)) if isinstance(measure, list) else measure
    return f"{found.get('arm')} against {found.get('against') or baseline} on {names}"


def _arms_of(claim: Located, baseline: str) -> set[str]:
    found = claim.plain()
    return {str(found.get("arm")), str(found.get("against") or baseline)} if isinstance(found, dict) else set()
