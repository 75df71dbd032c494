"""The stages of a training at which hooks are called."""

from enum import Enum, auto


class TrainingStage(Enum):
    """Stages in the order in which a training passes them; AFTER_VALIDATION follows each one."""

    __hash__ = object.__hash__  # members are unique; looked up many times a step

    SETUP = auto()
    BEFORE_TRAINING = auto()
    BEFORE_EPOCH = auto()
    BEFORE_BATCH = auto()
    BEFORE_FORWARD = auto()
    AFTER_FORWARD = auto()
    BEFORE_LOSS = auto()
    AFTER_LOSS = auto()
    BEFORE_BACKWARD = auto()
    DO_BACKWARD = auto()
    AFTER_BACKWARD = auto()
    BEFORE_OPTIMIZER_STEP = auto()
    DO_OPTIMIZER_STEP = auto()
    AFTER_OPTIMIZER_STEP = auto()
    AFTER_BATCH = auto()
    AFTER_EPOCH = auto()
    AFTER_TRAINING = auto()
    AFTER_VALIDATION = auto()


# A hook at one of these may do the work of the stage instead of the strategy.
DO_STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)

# Where `frequency` counts epochs, and where it does not apply: these are rare as it is.
EPOCH_STAGES = (TrainingStage.BEFORE_EPOCH, TrainingStage.AFTER_EPOCH)
RARE_STAGES = (
    TrainingStage.SETUP,
    TrainingStage.BEFORE_TRAINING,
    TrainingStage.AFTER_TRAINING,
    TrainingStage.AFTER_VALIDATION,
)
