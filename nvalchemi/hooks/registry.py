"""The registry: which hook is called at which stage, and their contexts around a run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from typing import Any


class HookRegistry:
    """Hooks of a workflow in their order.

    Parameters
    ----------
    stage_type : type of Enum
        The stages of the workflow.
    """

    def __init__(self, stage_type: type[Enum]) -> None:
        self._stage_type = stage_type
        self._entries: list[tuple[Any, Enum | None]] = []
        self._at: dict[Enum, list[tuple[int, Any]]] = {}

    def register(self, hook: Any, stage: Enum | None = None) -> None:
        """Add a hook, at `stage` instead of its own if that is given.

        Raises
        ------
        ValueError
            If its frequency is below 1, or it is registered already.
        TypeError
            If it can not be called, or has no stage of this workflow.
        """
        name = type(hook).__name__
        if isinstance(hook, type):
            raise TypeError(f"a hook is an instance, not the class: pass {hook.__name__}()")
        if not callable(hook):
            raise TypeError(f"a hook must be callable as hook(ctx, stage): got {name}")
        frequency = getattr(hook, "frequency", 1)
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise ValueError(f"frequency of {name} must be an integer >= 1: got {frequency!r}")
        if any(hook is other for other, _ in self._entries):
            raise ValueError(f"this {name} is registered already: a hook is listed once")
        own = stage if stage is not None else getattr(hook, "stage", None)
        if not (stage is None and hasattr(hook, "_runs_on_stage")) and not isinstance(
            own, self._stage_type
        ):
            raise TypeError(
                f"stage of {name} must be a {self._stage_type.__name__}: got {own!r} (a hook of "
                "several stages has _runs_on_stage(stage) instead)"
            )
        self._entries.append((hook, stage))
        self._at.clear()

    def unregister(self, hook: Any) -> None:
        """Take a hook out again."""
        self._entries = [entry for entry in self._entries if entry[0] is not hook]
        self._at.clear()

    def __iter__(self) -> Iterator[Any]:
        return (hook for hook, _ in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, stage: Enum) -> list[tuple[int, Any]]:
        """(frequency, hook) of the hooks that are called at a stage, in order."""
        hooks = self._at.get(stage)
        if hooks is None:
            hooks = self._at[stage] = [
                (getattr(hook, "frequency", 1), hook)
                for hook, given in self._entries
                if self._runs(hook, given, stage)
            ]
        return hooks

    @staticmethod
    def _runs(hook: Any, given: Enum | None, stage: Enum) -> bool:
        if given is not None:
            return given is stage
        if hasattr(hook, "_runs_on_stage"):
            return bool(hook._runs_on_stage(stage))
        return bool(hook.stage is stage)

    def performers(self, stage: Enum) -> list[Any]:
        """Hooks that do the work of a stage: their only stage is this one."""
        return [
            hook
            for hook, given in self._entries
            if given is stage
            or (given is None and not hasattr(hook, "_runs_on_stage") and hook.stage is stage)
        ]

    def refresh(self) -> None:
        """Ask the hooks of several stages anew where they run."""
        self._at.clear()

    def call_all(self, method: str, *args: Any) -> None:
        """Call a method on the hooks that have it."""
        for hook in self:
            function: Callable[..., Any] | None = getattr(hook, method, None)
            if function is not None:
                function(*args)

    def enter(self) -> ExitStack:
        """Enter the contexts of all hooks; the stack leaves them in reverse order.

        All that were entered are left, also when another one fails to enter or to leave.
        """
        with ExitStack() as stack:
            for hook in self:
                self.enter_one(hook, stack)
            return stack.pop_all()

    @staticmethod
    def enter_one(hook: Any, stack: ExitStack) -> None:
        """Enter the context of one hook on a stack; `close` alone is called when it is left."""
        if hasattr(hook, "__enter__") and hasattr(hook, "__exit__"):
            stack.enter_context(hook)
        elif hasattr(hook, "close"):
            stack.callback(hook.close)
