"""The registry of hooks: what is accepted, who is called, and contexts around a run."""

from enum import Enum, auto

import pytest

from nvalchemi.hooks import Hook, HookContext, HookRegistry


class Stage(Enum):
    FIRST = auto()
    WORK = auto()


class OtherStage(Enum):
    FIRST = auto()


class One:
    frequency = 1

    def __init__(self, stage=Stage.FIRST, frequency=1):
        self.stage = stage
        self.frequency = frequency

    def __call__(self, ctx, stage):
        pass


class Several:
    frequency = 3
    stage = None

    def __init__(self, *stages):
        self.stages = stages

    def _runs_on_stage(self, stage):
        return stage in self.stages

    def __call__(self, ctx, stage):
        pass


def registry(*hooks):
    made = HookRegistry(Stage)
    for hook in hooks:
        made.register(hook)
    return made


def test_protocol_and_context():
    assert isinstance(One(), Hook) and isinstance(Several(), Hook)
    assert not isinstance(object(), Hook)
    context = HookContext()
    assert (context.batch, context.model, context.global_rank, context.workflow) == (
        None,
        None,
        0,
        None,
    )
    with pytest.raises(TypeError):
        HookContext("batch")  # by keyword only


def test_train_context_is_found_where_scripts_look_for_it():
    from nvalchemi import hooks
    from nvalchemi.training import TrainContext

    assert hooks.TrainContext is TrainContext
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hooks.Nothing


@pytest.mark.parametrize("frequency", [0, -1, 1.5, True, "2", None])
def test_frequency(frequency):
    with pytest.raises(ValueError, match="frequency of One must be an integer >= 1: got"):
        registry(One(frequency=frequency))


@pytest.mark.parametrize("stage", [None, OtherStage.FIRST, "FIRST", 1])
def test_stage(stage):
    with pytest.raises(TypeError, match="stage of One must be a Stage: got"):
        registry(One(stage))


def test_stage_that_is_given_for_a_hook_of_several():
    with pytest.raises(TypeError, match="stage of Several must be a Stage: got"):
        HookRegistry(Stage).register(Several(), OtherStage.FIRST)


def test_not_callable():
    with pytest.raises(TypeError, match=r"must be callable as hook\(ctx, stage\): got object"):
        registry(object())


def test_the_same_hook_twice_but_equal_hooks_once_each():
    hook = One()
    with pytest.raises(ValueError, match="this One is registered already"):
        registry(hook, hook)
    assert len(registry(One(), One())) == 2


def test_order_frequency_and_stages():
    hooks = [One(), Several(Stage.WORK, Stage.FIRST), One(Stage.WORK, 2), One(frequency=5)]
    made = registry(*hooks)
    assert made.at(Stage.FIRST) == [(1, hooks[0]), (3, hooks[1]), (5, hooks[3])]
    assert made.at(Stage.WORK) == [(3, hooks[1]), (2, hooks[2])]
    assert list(made) == hooks
    made.unregister(hooks[1])
    assert made.at(Stage.WORK) == [(2, hooks[2])] and len(made) == 3


def test_given_stage_is_instead_of_the_own():
    made = HookRegistry(Stage)
    one, several = One(), Several(Stage.FIRST)
    made.register(one, Stage.WORK)
    made.register(several, Stage.WORK)
    assert made.at(Stage.FIRST) == []
    assert [hook for _, hook in made.at(Stage.WORK)] == [one, several]


def test_answers_of_hooks_are_asked_anew_after_refresh():
    several = Several(Stage.FIRST)
    made = registry(several)
    assert len(made.at(Stage.FIRST)) == 1 and made.at(Stage.WORK) == []
    several.stages = (Stage.WORK,)
    assert len(made.at(Stage.FIRST)) == 1
    made.refresh()
    assert made.at(Stage.FIRST) == [] and len(made.at(Stage.WORK)) == 1


def test_only_hooks_of_one_stage_perform():
    # W35: a hook of several stages observes, whatever it answers
    own, several = One(Stage.WORK), Several(Stage.WORK)
    made = registry(One(), own, several)
    assert made.performers(Stage.WORK) == [own]
    made.register(other := Several(), Stage.WORK)  # asked for by name
    assert made.performers(Stage.WORK) == [own, other]


def test_call_all():
    log = []

    class Told(One):
        def on_register(self, workflow):
            log.append(workflow)

    registry(One(), Told(), Several()).call_all("on_register", "workflow")
    assert log == ["workflow"]


class Context(One):
    def __init__(self, name, log, fail=None):
        super().__init__()
        self.name, self.log, self.fail = name, log, fail

    def __enter__(self):
        if self.fail == "enter":
            raise OSError(f"{self.name} enter")
        self.log.append(f"+{self.name}")
        return self

    def __exit__(self, kind, error, trace):
        self.log.append(f"-{self.name}" + (f"({error})" if error else ""))
        if self.fail == "exit":
            raise OSError(f"{self.name} exit")
        return self.fail == "swallow"


class Closed(One):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def close(self):
        self.log.append("closed")


class Both(Context):
    def close(self):
        self.log.append("closed too")


def test_contexts_are_left_in_reverse_order():
    log = []
    with registry(One(), Context("a", log), Closed(log), Both("b", log)).enter():
        log.append("run")
    assert log == ["+a", "+b", "run", "-b", "closed", "-a"]


def test_all_are_left_when_one_fails_to_enter():
    # W34
    log = []
    with pytest.raises(OSError, match="c enter"):
        registry(Context("a", log), Closed(log), Context("c", log, "enter")).enter()
    assert log == ["+a", "closed", "-a(c enter)"]


def test_all_are_left_when_one_fails_to_leave():
    log = []
    with pytest.raises(OSError, match="b exit"):
        with registry(Context("a", log), Context("b", log, "exit"), Closed(log)).enter():
            pass
    assert log == ["+a", "+b", "closed", "-b", "-a(b exit)"]


def test_error_of_the_run_reaches_all():
    log = []
    with pytest.raises(KeyError):
        with registry(Context("a", log), Context("b", log)).enter():
            raise KeyError("run")
    assert log == ["+a", "+b", "-b('run')", "-a('run')"]
