"""Predictions and the batches that they are of: given, or made by a strategy."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.training.arguments import MAIN
from nvalchemi.training.strategy import TrainingStrategy
from nvalchemi.training.validation import ValidationConfig, ValidationLoop


class Part(NamedTuple):
    """Predictions of a batch, and the batch with its references, of a data set."""

    predictions: Any
    batch: Batch
    name: str | None


def parts_of(source: Any, data: Any) -> Iterator[Part]:
    """Batches with their predictions, of all that `parity` takes."""
    if isinstance(source, TrainingStrategy):
        yield from predicted_by(source, data)
        return
    if data is not None:
        raise ValueError(
            "data is what a TrainingStrategy predicts for: predictions bring their own"
        )
    if isinstance(source, Mapping):
        for name, pairs in source.items():
            yield from (Part(*pair, str(name)) for pair in _pairs(pairs))
        return
    yield from (Part(*pair, None) for pair in _pairs(source))


def _pairs(given: Any) -> Iterator[tuple[Any, Batch]]:
    """One (predictions, batch), or several."""
    several = [given] if _is_pair(given) else given
    if isinstance(several, str) or not isinstance(several, Iterable):
        raise _not_understood(given)
    for pair in several:
        if not _is_pair(pair):
            raise _not_understood(pair)
        yield pair


def _is_pair(given: Any) -> bool:
    return (
        isinstance(given, tuple | list)
        and len(given) == 2
        and isinstance(given[1], Batch)
        and isinstance(given[0], Batch | Mapping)
    )


def _not_understood(given: Any) -> TypeError:
    return TypeError(
        "parity takes a TrainingStrategy, a pair (predictions, batch), a list of pairs, or a dict "
        "of them by the name of the data set, where predictions are a Batch or a dict with energy "
        f"and forces: got {type(given).__name__}"
    )


def predicted_by(strategy: TrainingStrategy, data: Any) -> Iterator[Part]:
    """What a strategy predicts for all of the data, in evaluation mode, by this process alone.

    Raises
    ------
    ValueError
        If there is no data, or its sampler would give only a rank's share.
    """
    config = strategy.validation_config
    if data is None:
        if config is None:
            raise ValueError(
                "parity of a strategy needs data: it has no validation_config, so give "
                "parity(strategy, loader)"
            )
        data = config.validation_data
    batches = [data] if isinstance(data, Batch) else data
    samplers: list[Any] = [getattr(data, name, None) for name in ("sampler", "batch_sampler")]
    for sampler in samplers:
        if getattr(sampler, "num_replicas", 1) > 1:
            raise ValueError(
                f"the sampler of the data is for one of {sampler.num_replicas} ranks, and parity "
                "looks at all of it by itself: give a loader without one"
            )
    given = {"validation_data": batches}
    settings = ValidationConfig(**given) if config is None else config.model_copy(update=given)
    for each in strategy.models.values():
        each.to(strategy.devices[0])
    with ValidationLoop.from_training_strategy(strategy, settings) as loop:
        model: Any = loop.models[MAIN] if loop.single_model else loop.models
        for batch in batches:
            batch = batch.to(strategy.devices[0])
            yield Part(_renamed(loop.function(model, batch), strategy), batch.to("cpu"), None)


def _renamed(predictions: Mapping[str, Tensor], strategy: TrainingStrategy) -> dict[str, Tensor]:
    """Predictions by the name of the label, as the losses of the strategy pair them."""
    leaves: Any = strategy.loss_fn.components
    pairs = {leaf.target_key: leaf.prediction_key for leaf in leaves}
    found = {}
    for name in ("energy", "forces"):
        for key in (pairs.get(name), f"predicted_{name}", name):
            if key is not None and key in predictions:
                found[name] = predictions[key]
                break
    return found
