"""Controls of the settings of a plan, and the plan that they ask for."""

import html

import ipywidgets

from nvalchemi.notebook.explorers.controls import check, choice, number, whole_number
from nvalchemi.notebook.explorers.pane import TEXT_COLOUR
from nvalchemi.sharding import ShardPlan
from nvalchemi.sharding.replan import replan, settings_of

_LABELS = {
    "world_size": "world size",
    "batch_size": "batch size",
    "seed": "seed",
    "shuffle": "shuffle",
    "drop_last": "drop_last",
    "epoch_policy": "policy",
}
_POLICIES = ("dataset_size", "min_size", "max_size")
_NONE = ""  # a dropdown with the value None shows nothing


class SettingsControls:
    """World size, batch size, seed, shuffle, drop_last and policy, as far as a plan has them.

    Attributes
    ----------
    controls : dict of str to widget
        By the names of the settings; those that can not be changed are disabled.
    reasons : ipywidgets.HTML
        Why, for each of these.
    """

    def __init__(self, plan: ShardPlan) -> None:
        known = settings_of(plan)
        self.controls: dict[str, ipywidgets.Widget] = {
            "world_size": number(_LABELS["world_size"], known["world_size"].value, 1),
            "batch_size": number(_LABELS["batch_size"], known["batch_size"].value, 1),
            "seed": whole_number(_LABELS["seed"], known["seed"].value),
            "shuffle": check(_LABELS["shuffle"], known["shuffle"].value),
            "drop_last": check(_LABELS["drop_last"], known["drop_last"].value),
            "epoch_policy": choice(
                _LABELS["epoch_policy"],
                [("none", _NONE), *((name, name) for name in _POLICIES)],
                known["epoch_policy"].value or _NONE,
            ),
        }
        self.reasons = ipywidgets.HTML()
        self.describe(plan)

    def asked(self, plan: ShardPlan) -> ShardPlan:
        """The plan that the controls ask for: the same one if nothing has changed."""
        changes = {
            name: self.controls[name].value
            for name, setting in settings_of(plan).items()
            if not setting.fixed and self.controls[name].value != setting.value
        }
        if not changes:
            return plan
        new = replan(plan, **changes)
        self.describe(new)
        return new

    def describe(self, plan: ShardPlan) -> None:
        """Enable what can be changed in this plan, and say why the rest can not."""
        reasons: dict[str, list[str]] = {}
        for name, setting in settings_of(plan).items():
            control = self.controls[name]
            control.disabled = bool(setting.fixed)
            control.tooltip = setting.fixed or f"{_LABELS[name]} of the plan"
            if setting.fixed:
                control.value = _NONE if setting.value is None else setting.value
                reasons.setdefault(setting.fixed, []).append(_LABELS[name])
        lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        text = html.escape(f"Not to be changed: {'; '.join(lines)}.") if lines else ""
        self.reasons.value = f'<div style="{TEXT_COLOUR};opacity:0.8">{text}</div>'
